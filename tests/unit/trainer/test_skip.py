"""An update of MFTrainer with non-finite gradients changes nothing."""

import contextlib
import math
from typing import Any

import pytest
from transformers import Adafactor, Trainer, TrainerCallback
from transformers.optimization import AdafactorSchedule

from mfwrap import ExponentialMovingAverage, StepConfig
from mfwrap.trainer import MFTrainer
from support.deferral import late_results
from support.trainer_runs import (
    Run,
    assert_same_weights,
    new_trainer,
    spoilt_llama,
    tiny_llama,
    train,
    values,
)
from support.training_state import assert_unchanged, training_state

NAN, INF = float("nan"), float("inf")
COSINE = {"lr_scheduler_type": "cosine", "warmup_steps": 2, "max_steps": 6}
PRECISIONS = {"float32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}
OPTIMIZERS = ["adamw_torch_fused", "adamw_torch", "adafactor", "sgd"]

each_precision = pytest.mark.parametrize("precision", PRECISIONS.values(), ids=PRECISIONS)


class Observer(TrainerCallback):
    """Record the state after each update, and whether the accelerator reports a skip."""

    def __init__(self) -> None:
        self.trainer: Trainer | None = None
        self.states: list[dict[str, Any]] = []
        self.averages: list[dict[str, Any]] = []
        self.said_at_once: list[bool] = []
        self.said: list[bool] = []
        self.reported: list[bool] = []

    def on_train_begin(self, *_, **__):
        self._note()

    def on_optimizer_step(self, *_, **__):
        self.said_at_once.append(self.trainer.accelerator.optimizer_step_was_skipped)

    def on_step_end(self, *_, step_report=None, **__):
        self.said.append(self.trainer.accelerator.optimizer_step_was_skipped)
        if step_report is not None:
            self.reported.append(step_report.skipped.item())
        self._note()

    def _note(self) -> None:
        trainer = self.trainer
        state = training_state(trainer.model, trainer.optimizer.optimizer)
        # Leave out the parameter groups: if the schedule has already advanced, they contain the
        # learning rates of the next update.
        self.states.append({name: v for name, v in state.items() if "/param_groups/" not in name})
        ema = getattr(trainer, "ema", None)
        if ema is not None:
            self.averages.append({name: each.clone() for name, each in ema.named_averages()})


def observed(folder, factors, *, kind=MFTrainer, **settings) -> tuple[Run, Observer]:
    """Return a run whose losses are multiplied by `factors`, one per micro-batch."""
    observer = Observer()
    observer.trainer = new_trainer(
        kind, folder, model=spoilt_llama(factors), callbacks=[observer], **COSINE | settings
    )
    return train(observer.trainer), observer


def with_average(model) -> ExponentialMovingAverage:
    """Return an average with a small decay."""
    return ExponentialMovingAverage(model, 0.5)


def at(*updates: int, bad: float = NAN) -> list[float]:
    """Return factors that spoil the second micro-batch of some updates."""
    factors = [1.0] * 24
    for update in updates:
        factors[4 * update + 1] = bad
    return factors


@pytest.mark.fast_sample(4)
@each_precision
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_weights_state_and_average_stay_the_same_bits(optimizer, precision, tmp_path):
    """An update with NaN or inf changes no bit of the state, and later updates are applied."""
    settings = {"optim": optimizer, "extras": {"ema": with_average}, **precision}
    factors = [*at(0)[:4], *at(2, bad=INF)]
    run, observer = observed(tmp_path, factors, **settings)

    skipped = [True, False, False, True, False, False]
    assert observer.reported == skipped
    for update, is_skipped in enumerate(skipped):
        pairs = [(kept[update], kept[update + 1]) for kept in (observer.states, observer.averages)]
        if is_skipped:
            for before, after in pairs:
                assert_unchanged(before, after)
        elif values(run, "learning_rate")[update] > 0:
            for before, after in pairs:
                assert any((after[name] != value).any() for name, value in before.items())
    assert all(weight.isfinite().all() for weight in run.weights.values())
    assert values(run, "skipped_updates") == [1, 1, 1, 2, 2, 2]


@pytest.mark.fast_sample(3)
@pytest.mark.parametrize(
    "settings",
    [
        *PRECISIONS.values(),
        {"lr_scheduler_type": "linear"},
        {"lr_scheduler_type": "constant_with_warmup"},
        {"lr_scheduler_type": "polynomial"},
    ],
    ids=[*PRECISIONS, "linear", "constant with warm-up", "polynomial"],
)
def test_the_schedule_waits_for_a_skipped_update(settings, tmp_path):
    """After a skip, the next update uses the same rate, and the schedule continues from there."""
    run, _ = observed(tmp_path / "skips", at(1, 4), **settings)
    stock, _ = observed(tmp_path / "stock", [], kind=Trainer, **settings)

    rates = values(stock, "learning_rate")
    assert values(run, "learning_rate") == [rates[i] for i in (0, 1, 1, 2, 3, 3)]
    assert run.trainer.lr_scheduler.last_epoch == 4
    assert run.trainer.state.global_step == 6


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize("late", [True, False], ids=["late", "at once"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS[:2])
def test_the_schedule_waits_for_a_skip_that_nobody_asks_about(optimizer, late, tmp_path):
    """Rates and the schedule's position count applied updates, whenever the results arrive."""
    settings = {"optim": optimizer, **COSINE}
    stock = train(new_trainer(Trainer, tmp_path / "stock", **settings))
    with late_results() if late else contextlib.nullcontext():
        trainer = new_trainer(MFTrainer, tmp_path, model=spoilt_llama(at(1, 4)), **settings)
        run = train(trainer)

    rates = values(stock, "learning_rate")
    assert values(run, "learning_rate") == [rates[i] for i in (0, 1, 1, 2, 3, 3)]
    assert trainer.lr_scheduler.last_epoch == 4


@pytest.mark.parametrize("late", [True, False], ids=["late", "at once"])
def test_the_trainer_itself_does_not_wait_for_the_answer(late, tmp_path):
    """Right after the update, the Trainer is told of a skip only if the answer is free."""
    told = []

    class Asks(MFTrainer):
        def _get_learning_rate(self) -> float:
            told.append(self.accelerator.optimizer_step_was_skipped)
            return super()._get_learning_rate()

    settings = {"logging_strategy": "no", **COSINE}
    with late_results() if late else contextlib.nullcontext():
        train(new_trainer(Asks, tmp_path, model=spoilt_llama(at(1, 2)), **settings))

    assert told == [False, not late, not late, False, False, False]


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
def test_a_schedule_that_is_stepped_without_a_training_is_stocks(tmp_path):
    """`create_optimizer_and_scheduler` and bare steps give the stock Trainer's rates."""
    rates = {}
    for kind in (Trainer, MFTrainer):
        trainer = new_trainer(kind, tmp_path, learning_rate=1e-2, lr_scheduler_type="linear")
        trainer.create_optimizer_and_scheduler(10)
        rates[kind] = []
        for _ in range(10):
            trainer.lr_scheduler.step()
            rates[kind].append(
                (trainer.optimizer.param_groups[0]["lr"], trainer._get_learning_rate())
            )

    assert rates[MFTrainer] == rates[Trainer]
    assert rates[MFTrainer][0][0] == pytest.approx(9e-3)


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
def test_the_final_rate_of_an_adafactor_that_computes_its_rate_is_stocks(tmp_path):
    """After training with ``Adafactor(lr=None)``, the group holds the rate of the last update."""
    rates = {}
    for kind in (Trainer, MFTrainer):
        model = tiny_llama()
        optimizer = Adafactor(model.parameters())
        pair = {"optimizers": (optimizer, AdafactorSchedule(optimizer))}
        run = train(new_trainer(kind, tmp_path, model=model, extras=pair))
        rates[kind] = [float(optimizer.param_groups[0]["lr"]), *values(run, "learning_rate")]

    assert rates[MFTrainer] == pytest.approx(rates[Trainer])
    assert rates[MFTrainer][0] > 0


@each_precision
def test_who_asks_after_an_update_gets_the_truth(precision, tmp_path):
    """``optimizer_step_was_skipped`` is correct after the optimizer and at the step's end."""
    _, observer = observed(tmp_path, at(0, 2, 3), **precision)

    expected = [True, False, True, True, False, False]
    assert observer.said == expected
    assert observer.said_at_once == expected
    assert observer.reported == expected


def test_asking_changes_nothing(tmp_path):
    """A run that is observed gives the same results as one that is not."""
    run, _ = observed(tmp_path / "asked", at(2))
    alone = train(new_trainer(MFTrainer, tmp_path / "b", model=spoilt_llama(at(2)), **COSINE))

    assert_same_weights(alone, run)
    assert values(run, "learning_rate") == values(alone, "learning_rate")


def test_the_scale_of_fp16_is_dynamic_on_every_device(tmp_path):
    """In fp16, the loss scale starts at 65536, and each overflow halves it."""
    run, _ = observed(tmp_path, at(1, 2), fp16=True)

    assert values(run, "loss_scale") == [2.0**16, 2.0**15, 2.0**14, 2.0**14, 2.0**14, 2.0**14]
    assert values(run, "overflows") == [0, 1, 2, 2, 2, 2]


@pytest.mark.parametrize("precision", [{}, {"bf16": True}], ids=["float32", "bf16"])
def test_the_stock_trainer_loses_the_model(precision, tmp_path):
    """One bad micro-batch makes all weights NaN in the stock Trainer, but none in MFTrainer."""
    run, observer = observed(tmp_path / "stock", at(2), kind=Trainer, **precision)
    ours, _ = observed(tmp_path / "ours", at(2), **precision)

    assert all(weight.isnan().all() for weight in run.weights.values())
    assert observer.said == [False] * 6
    assert all(math.isnan(norm) for norm in values(run, "grad_norm")[2:])
    assert all(weight.isfinite().all() for weight in ours.weights.values())
    finite = [math.isfinite(norm) for norm in values(ours, "grad_norm")]
    assert finite == [True, True, False, True, True, True]


def test_a_spike_of_the_norm_is_skipped_where_it_is_asked_for(tmp_path):
    """A spike of the norm leaves weights, schedule and loss scale unchanged."""
    step = StepConfig(
        use_clip_grad=True, use_skip_data_by_global_norm=True, global_norm_spike_threshold=50.0
    )
    run, observer = observed(tmp_path, at(3, bad=1e3), extras={"step": step}, fp16=True)

    assert observer.said == [False, False, False, True, False, False]
    assert_unchanged(observer.states[3], observer.states[4])
    assert values(run, "loss_scale") == [2.0**16] * 6
    assert values(run, "overflows") == [0] * 6
    rates = values(run, "learning_rate")
    assert rates[4] == rates[3] != rates[5]


@pytest.mark.parametrize("optimizer", OPTIMIZERS[:2])
def test_a_schedule_of_a_metric_is_stepped_at_once(optimizer, tmp_path):
    """``ReduceLROnPlateau`` is stepped right at an evaluation, not one update later."""
    settings = {
        "optim": optimizer,
        "lr_scheduler_type": "reduce_lr_on_plateau",
        "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0, "threshold_mode": "abs"},
        "warmup_steps": 0,
        "eval_strategy": "steps",
        "eval_steps": 2,
        "metric_for_best_model": "loss",
    }
    run, _ = observed(tmp_path, at(2), **settings)

    assert values(run, "learning_rate") == pytest.approx([1e-2] * 4 + [1e-3] * 2)


def test_training_that_only_skips_ends_with_an_error(tmp_path):
    """Too many skips in a row raise an error; weights stay finite and arguments are restored."""
    factors = at(1, 2, 3, 4, 5)
    step = StepConfig(max_consecutive_skips=3, local_norm=True, local_norm_groups="layer")
    trainer = new_trainer(
        MFTrainer, tmp_path, model=spoilt_llama(factors), extras={"step": step}, **COSINE
    )

    message = r"3 updates in a row were skipped, the last one at step 4; .*model\.layers\.0"
    with pytest.raises(RuntimeError, match=message):
        trainer.train()
    assert all(weight.isfinite().all() for weight in trainer.model.parameters())
    assert trainer.args.logging_nan_inf_filter is True
    assert trainer.state.global_step <= 5


def test_skips_at_the_end_of_a_training_end_it_with_an_error_too(tmp_path):
    """Too many skips raise an error even if no update follows and nothing is logged."""
    step = StepConfig(max_consecutive_skips=2)
    model = spoilt_llama(at(4, 5))
    settings = {**COSINE, "logging_strategy": "no"}
    trainer = new_trainer(MFTrainer, tmp_path, model=model, extras={"step": step}, **settings)

    with pytest.raises(RuntimeError, match="2 updates in a row were skipped"):
        trainer.train()
