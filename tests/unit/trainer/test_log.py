"""MFTrainer adds the step's numbers to the Trainer's log, and leaves non-finite losses out."""

import contextlib
import functools
import inspect
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from transformers import LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from mfwrap import DynamicLossScaleUpdateCell, StepConfig
from mfwrap.trainer import MFTrainer
from mfwrap.trainer.log import StepLog, with_outputs
from support.deferral import late_results
from support.trainer_runs import (
    Counting,
    Run,
    assert_same_log,
    assert_same_weights,
    counted_labels,
    new_trainer,
    padded,
    spoilt_llama,
    tiny_llama,
    train,
    values,
)

NAN, INF = float("nan"), float("inf")


class Losses:
    """Record each micro-batch's summed loss and number of targets, before the loss is spoilt."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        self.sums: list[float] = []
        self.counts: list[int] = []
        model.register_forward_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, _inputs: tuple, keywords: dict, output: object) -> None:
        if not module.training:
            return
        logits, labels = output["logits"].detach()[:, :-1], keywords["labels"][:, 1:]
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1).double(), labels.flatten(), reduction="sum"
        )
        self.sums.append(loss.item())
        counted = counted_labels(keywords["labels"])
        self.counts.append(counted.ne(-100).sum().item())

    def mean(self, *micro_batches: int) -> float:
        """Return the mean loss over the targets that the Trainer counts in some micro-batches."""
        return sum(self.sums[m] for m in micro_batches) / sum(self.counts[m] for m in micro_batches)


def spoilt_run(folder, factors, *, kind=MFTrainer, data=None, **settings) -> tuple[Run, Losses]:
    """Return a run whose losses are multiplied by `factors`, and its original losses."""
    model = spoilt_llama(factors)
    losses = Losses(model)
    data = Counting(64, length=5) if data is None else data
    return train(new_trainer(kind, folder, model=model, data=data, **settings)), losses


def test_each_log_of_a_loss_has_what_the_step_knows(tmp_path):
    """Each log of a loss has the step's numbers as JSON values; the final entry has none."""
    run, _ = spoilt_run(tmp_path, [1] * 4 + [INF], extras={"scale_sense": 2.0**10})
    added = {"loss_scale": 1024.0, "non_finite_losses": 0}
    *steps, whole = run.log

    names = ("applied_updates", "skipped_updates", "overflows", "non_finite_losses")
    counts = [tuple(entry[name] for name in names) for entry in steps]
    assert counts == [(1, 0, 0, 0), (1, 1, 1, 1), (2, 1, 1, 1), (3, 1, 1, 1)]
    assert [entry["loss_scale"] for entry in steps] == [1024.0] * 4
    assert all(type(entry[name]) is int for entry in steps for name in names)
    assert not added.keys() & whole.keys()
    assert repr(json.loads(json.dumps(steps))) == repr(steps)


def test_the_loss_scale_in_the_log_is_that_of_the_next_update(tmp_path):
    """An overflow or a finished window changes the loss scale in the log of the same update."""
    scale = DynamicLossScaleUpdateCell(2.0**8, 2, 2)
    run, _ = spoilt_run(tmp_path, [1] * 4 + [INF], extras={"scale_sense": scale}, max_steps=5)

    assert values(run, "loss_scale") == [256.0, 128.0, 128.0, 256.0, 256.0]


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_a_loss_that_is_not_finite_is_left_out_and_counted(bad, tmp_path):
    """Logged loss and training loss are means of finite losses; non-finite ones are counted."""
    run, losses = spoilt_run(tmp_path, [1, bad])

    expected = [losses.mean(0, 2, 3)]
    expected += [losses.mean(*range(first, first + 4)) for first in (4, 8, 12)]
    assert values(run, "loss") == pytest.approx(expected, rel=1e-6)
    assert run.result.training_loss == pytest.approx(sum(expected) / 4, rel=1e-6)
    assert values(run, "non_finite_losses") == [1] * 4


def test_the_mean_of_the_others_counts_their_targets(tmp_path):
    """In the mean of the finite losses, each loss is weighted by its number of targets."""
    run, losses = spoilt_run(tmp_path, [1, NAN], data=Counting(64))

    assert len(set(losses.counts[:4])) > 1
    expected = [losses.mean(0, 2, 3), losses.mean(4, 5, 6, 7)]
    assert values(run, "loss")[:2] == pytest.approx(expected, rel=1e-6)


def test_targets_are_counted_for_a_loss_function_of_the_user(tmp_path):
    """With ``compute_loss_func``, targets are counted even if the model does not take the count."""
    factors = iter([1.0, NAN])
    sums, counts = [], []

    def spoilt(output, labels, num_items_in_batch):
        logits, targets = output["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = nn.functional.cross_entropy(logits, targets, reduction="sum")
        sums.append(total.item())
        counts.append(counted_labels(labels).ne(-100).sum().item())
        return total / num_items_in_batch * next(factors, 1.0)

    settings = {"max_steps": 1, "extras": {"compute_loss_func": spoilt}}
    trainer = new_trainer(MFTrainer, tmp_path, **settings)
    trainer.model_accepts_loss_kwargs = False
    run = train(trainer)

    assert len(set(counts)) > 1
    expected = (sum(sums) - sums[1]) / (sum(counts) - counts[1])
    assert values(run, "loss") == pytest.approx([expected], rel=1e-6)


class Ranks(TrainingArguments):
    """Arguments of a training on one rank or two."""

    num_ranks = 1

    @property
    def world_size(self) -> int:
        return self.num_ranks


@pytest.mark.parametrize(("num_ranks", "share"), [(1, 0.25), (2, 0.5)])
def test_the_share_of_a_micro_batch(num_ranks, share):
    """One rank counts targets; several ranks weigh micro-batches equally, without a collective."""
    args = Ranks("unused", use_cpu=True, report_to="none", gradient_accumulation_steps=2)
    args.num_ranks = num_ranks
    trainer = MFTrainer(tiny_llama(), args)
    trainer.current_gradient_accumulation_steps = 2
    micro_batch = padded([Counting(1, length=6)[0]])
    num_targets = 4 * counted_labels(micro_batch["labels"]).numel()

    assert (
        trainer._MFTrainerMixin__losses.share_of_update(micro_batch, torch.tensor(num_targets))
        == share
    )


def test_the_mean_of_the_others_weighs_windows_equally(tmp_path):
    """An epoch's last update, which has fewer micro-batches, weighs as much as other updates."""

    class One(nn.Module):
        """A network with loss 1 and gradient 0."""

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))
            self.factors = iter([1.0, NAN])

        def forward(self, input_ids, attention_mask, labels):
            del input_ids, attention_mask, labels
            return {"loss": (1 + 0 * self.weight) * next(self.factors, 1.0)}

    settings = {"max_steps": -1, "num_train_epochs": 1, "logging_strategy": "epoch"}
    run = train(new_trainer(MFTrainer, tmp_path, model=One(), data=Counting(20), **settings))

    assert values(run, "step")[0] == 3
    assert values(run, "loss") == pytest.approx([1.0], rel=1e-6)
    assert run.result.training_loss == pytest.approx(1.0, rel=1e-6)


def test_losses_are_left_out_of_the_mean_of_several_updates(tmp_path):
    """Bad losses are left out of the mean of two updates that are logged together."""
    factors = [1, NAN, 1, 1, 1, 1, NAN, NAN]
    run, losses = spoilt_run(tmp_path, factors, logging_steps=2)

    expected = [losses.mean(0, 2, 3, 4, 5), losses.mean(*range(8, 16))]
    assert values(run, "loss") == pytest.approx(expected, rel=1e-6)
    assert values(run, "non_finite_losses") == [3, 3]
    assert values(run, "overflows") == [2, 2]


def test_losses_are_left_out_without_accumulation(tmp_path):
    """Without accumulation, all updates weigh equally in the mean of the finite losses."""
    run, losses = spoilt_run(
        tmp_path,
        [1, NAN, 1, 1],
        logging_steps=4,
        gradient_accumulation_steps=1,
        data=Counting(64),
    )

    expected = sum(losses.mean(step) for step in (0, 2, 3)) / 3
    assert values(run, "loss")[0] == pytest.approx(expected, rel=1e-6)
    assert values(run, "non_finite_losses")[0] == 1


def test_a_log_without_any_finite_loss_has_no_loss(tmp_path):
    """If no loss is finite, the log has no ``loss``; other logs are unaffected."""
    run, losses = spoilt_run(tmp_path, [1] * 4 + [NAN] * 4)

    assert ["loss" in entry for entry in run.log] == [True, False, True, True, False]
    assert values(run, "applied_updates") == [1, 1, 2, 3]
    expected = [losses.mean(*range(first, first + 4)) for first in (0, 8, 12)]
    assert values(run, "loss") == pytest.approx(expected, rel=1e-6)
    assert math.isfinite(run.result.training_loss)


def test_bad_losses_after_the_last_log_are_left_out_of_the_training_s(tmp_path):
    """Bad losses after the last log are left out of the mean loss of the training."""
    run, losses = spoilt_run(tmp_path, [1] * 13 + [NAN], logging_steps=3)

    means = [losses.mean(*range(first, first + 4)) for first in (0, 4, 8)]
    expected = [*means, losses.mean(12, 14, 15)]
    assert values(run, "loss") == pytest.approx([sum(means) / 3], rel=1e-6)
    assert run.result.training_loss == pytest.approx(sum(expected) / 4, rel=1e-6)
    assert run.log[-1]["train_loss"] == run.result.training_loss


@pytest.mark.parametrize("logging_steps", [1, 2, 3])
@pytest.mark.parametrize("first", [8, 4, 0])
def test_losses_that_are_lost_for_good_do_not_lower_the_mean(first, logging_steps, tmp_path):
    """The training loss is the mean of the finite losses, NaN if there are none."""
    factors = [1] * first + [NAN] * (16 - first)
    run, losses = spoilt_run(tmp_path, factors, logging_steps=logging_steps)

    expected = losses.mean(*range(first)) if first else NAN
    assert run.log[-1]["train_loss"] == pytest.approx(expected, rel=1e-6, nan_ok=True)


def test_without_the_filter_a_bad_loss_is_logged_as_it_is(tmp_path):
    """Without the filter, a bad loss is logged as in the stock Trainer; its update is skipped."""
    settings = {"logging_nan_inf_filter": False}
    run, _ = spoilt_run(tmp_path / "ours", [1] * 4 + [NAN], **settings)
    stock, _ = spoilt_run(tmp_path / "stock", [1] * 4 + [NAN], kind=Trainer, **settings)

    assert values(run, "loss") == pytest.approx(values(stock, "loss"), nan_ok=True)
    assert math.isnan(values(run, "loss")[1])
    assert values(run, "non_finite_losses") == [0, 1, 1, 1]
    assert all(weight.isfinite().all() for weight in run.weights.values())


class LogsLoss(TrainerCallback):
    """Log a loss of the user after the second micro-batch of each update."""

    trainer: Trainer
    num_parts = 0

    def on_substep_end(self, *_, **__):
        self.num_parts += 1
        if self.num_parts % 3 == 2:
            self.trainer.log({"loss": 7.0})


def test_a_loss_that_the_user_logs_stays_as_it_is(tmp_path):
    """A loss that the user logs after a training is logged unchanged."""
    run, _ = spoilt_run(tmp_path, [])
    run.trainer.log({"loss": 2.0})

    assert run.log[-1] == {"loss": 2.0, "step": 4, "epoch": run.trainer.state.epoch}


def test_a_loss_that_the_user_logs_meanwhile_changes_no_other(tmp_path):
    """A loss that the user logs during a training does not change the Trainer's own logs."""
    callback = LogsLoss()
    model = spoilt_llama([1, NAN])
    losses = Losses(model)
    settings = {"data": Counting(64, length=5), "logging_steps": 2, "callbacks": [callback]}
    callback.trainer = new_trainer(MFTrainer, tmp_path, model=model, **settings)
    run = train(callback.trainer)

    own = [entry["loss"] for entry in run.log if "grad_norm" in entry]
    expected = [losses.mean(0, *range(2, 8)), losses.mean(*range(8, 16))]
    assert own == pytest.approx(expected, rel=1e-6)
    users = [entry["loss"] for entry in run.log if "loss" in entry and "grad_norm" not in entry]
    assert users == [7.0] * 4


class GradientNorms(TrainerCallback):
    """Record the norms of the gradients that the optimizer gets, by parameter."""

    def __init__(self) -> None:
        self.norms: list[dict[str, float]] = []

    def on_pre_optimizer_step(self, *_, model=None, **__):
        self.norms.append(
            {name: p.grad.double().norm().item() for name, p in model.named_parameters()}
        )


@pytest.mark.parametrize("max_grad_norm", [0.0, 0.1, 1e3])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_norms_are_of_gradients_before_clipping(precision, max_grad_norm, tmp_path):
    """Logged global and local norms are those of unscaled gradients before clipping."""
    norms = GradientNorms()
    step = StepConfig(local_norm=True, local_norm_groups="layer")
    settings = {"extras": {"scale_sense": 2.0**10, "step": step}, "bf16": precision == "bf16"}
    run = train(
        new_trainer(MFTrainer, tmp_path, callbacks=[norms], max_grad_norm=max_grad_norm, **settings)
    )

    whole = [math.hypot(*each.values()) / 2**10 for each in norms.norms]
    assert values(run, "grad_norm") == pytest.approx(whole, rel=1e-5)
    for layer in ("model.layers.0", "model.layers.1", "model.embed_tokens"):
        expected = [
            math.hypot(*(norm for name, norm in each.items() if name.startswith(f"{layer}.")))
            / 2**10
            for each in norms.norms
        ]
        assert values(run, f"local_norm/{layer}") == pytest.approx(expected, rel=1e-5)
    groups = [name for name in run.log[0] if name.startswith("local_norm/")]
    squares = sum(run.log[0][name] ** 2 for name in groups)
    assert math.sqrt(squares) == pytest.approx(whole[0], rel=1e-5)


def test_there_are_no_local_norms_unless_they_are_asked_for(tmp_path):
    """By default the log has no local norms."""
    run = train(new_trainer(MFTrainer, tmp_path))

    assert not [name for name in run.log[0] if name.startswith("local_norm")]


def test_tensorboard_gets_what_the_log_has(tmp_path, monkeypatch):
    """TensorBoard gets each number of the log as a scalar at the step of its update."""
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "events"))
    step = StepConfig(local_norm=True, local_norm_groups=["lm_head"])
    trainer = new_trainer(
        MFTrainer, tmp_path, model=tiny_llama(), report_to="tensorboard", extras={"step": step}
    )
    run = train(trainer)
    events = EventAccumulator(str(tmp_path / "events"))
    events.Reload()

    tags = ("loss", "grad_norm", "loss_scale", "applied_updates", "skipped_updates")
    tags += ("overflows", "non_finite_losses", "local_norm/lm_head")
    for tag in tags:
        found = {event.step: event.value for event in events.Scalars(f"train/{tag}")}
        assert found == pytest.approx({e["step"]: e[tag] for e in run.log[:-1]}, rel=1e-6), tag


CPU = torch.device("cpu")


def _itself(part: float | torch.Tensor) -> float | torch.Tensor:
    return part


ANY_LOSS = st.one_of(st.floats(-1e3, 1e3, width=32), st.sampled_from([NAN, INF, -INF]))


@given(
    updates=st.lists(st.tuples(ANY_LOSS, ANY_LOSS, st.floats(0.01, 0.99)), max_size=90),
    arrives_late=st.booleans(),
)
def test_the_sum_is_completed_by_the_share_of_filtered_losses(updates, arrives_late):
    """`completed_sum` agrees with float64, whether shares are numbers or tensors."""
    with late_results() if arrives_late else contextlib.nullcontext():
        check_completed_sum(updates)


def check_completed_sum(updates):
    """Compare a sum with float64 arithmetic."""
    log = StepLog(CPU)
    kept = total = torch.zeros((), dtype=torch.float64)
    left_out = 0
    for first, second, share in updates:
        shares = (share, torch.tensor(1 - share, dtype=torch.float64))
        for loss, part in zip((first, second), shares, strict=True):
            filtered = log.filtered(torch.tensor(loss), functools.partial(_itself, part))
            assert filtered.item() == (loss if math.isfinite(loss) else 0)
            total = total + filtered.double()
            kept = kept + (part if math.isfinite(loss) else 0)
            left_out += not math.isfinite(loss)
        log.num_steps += 1

    completed = log.completed_sum(total)

    if left_out == 2 * len(updates):
        assert completed == total
    else:
        expected = total * (len(updates) / kept)
        torch.testing.assert_close(completed, expected, rtol=1e-9, atol=1e-9)
    state = log.state_dict()
    assert (state["left_out"], state["non_finite_losses"]) == (left_out, left_out)
    assert state["num_losses"] == 2 * len(updates)


@pytest.mark.parametrize("pending", [1, 63, 64, 65, 200])
def test_a_state_includes_pending_losses(pending):
    """A saved state includes pending losses; loading it drops losses that were pending before."""
    log, other = StepLog(CPU), StepLog(CPU)
    for _ in range(pending):
        log.filtered(torch.tensor(NAN), lambda: 0.25)
        other.filtered(torch.tensor(INF), lambda: 0.5)

    other.load_state_dict(log.state_dict())

    assert other.state_dict() == log.state_dict()
    assert other.state_dict()["left_share"] == pending / 4


def test_without_the_filter_losses_are_counted_and_kept():
    """Without the filter, a non-finite loss is counted and returned unchanged."""
    log = StepLog(CPU, filters=False)

    assert log.filtered(torch.tensor(INF), lambda: 0.5).isinf()
    state = log.state_dict()
    assert (state["non_finite_losses"], state["left_out"], state["left_share"]) == (1, 0, 0)


def test_on_a_cpu_only_the_share_of_a_bad_loss_is_counted():
    """A finite loss is read at once, returned as it is, and its share is not asked for."""
    log, asked = StepLog(CPU), []
    losses = [torch.tensor(loss) for loss in (1.0, NAN, 2.0)]

    kept = [log.filtered(loss, lambda: asked.append(1) or 0.5) for loss in losses]

    assert (kept[0] is losses[0], kept[1].item(), kept[2] is losses[2], asked) == (
        True,
        0,
        True,
        [1],
    )


class PopsLabels(MFTrainer):
    """A trainer whose step takes the labels out of the micro-batch."""

    def _prepare_inputs(self, inputs):
        prepared = super()._prepare_inputs(inputs)
        inputs.pop("labels")
        return prepared


@pytest.mark.parametrize("arrives_late", [True, False])
def test_the_share_is_that_of_the_labels_before_the_step(arrives_late, tmp_path):
    """A step that takes the labels out of its micro-batch changes no mean."""
    with late_results() if arrives_late else contextlib.nullcontext():
        run, losses = spoilt_run(tmp_path, [1, NAN], kind=PopsLabels, data=Counting(64))

    expected = [losses.mean(0, 2, 3), losses.mean(4, 5, 6, 7)]
    assert values(run, "loss")[:2] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("is_asked_for", [True, False, None])
@pytest.mark.parametrize("is_named", [True, False])
def test_a_call_that_returns_the_output_too(is_named, is_asked_for):
    """`compute_loss` is called with the same arguments, but returns the model's output, too."""
    args, keywords = ("network", "inputs"), {"num_items_in_batch": 7}
    if is_asked_for is not None and is_named:
        keywords["return_outputs"] = is_asked_for
    elif is_asked_for is not None:
        args, keywords = (*args, is_asked_for, 7), {}
    args, keywords, was_asked_for = with_outputs(args, keywords)
    call = inspect.signature(Trainer.compute_loss).bind("trainer", *args, **keywords)

    assert list(call.arguments.values()) == ["trainer", "network", "inputs", True, 7]
    assert was_asked_for is bool(is_asked_for)


def own_step(base, factors=()):
    """Return a trainer whose ``training_step`` does not call that of its base.

    Args:
        base: Class of the trainer.
        factors: Factors of the losses that the first micro-batches return.
    """
    left = iter(factors)

    class Own(base):
        def training_step(self, model, inputs, num_items_in_batch=None):
            model.train()
            inputs = self._prepare_inputs(inputs)
            loss = self.compute_loss(model, inputs) / self.args.gradient_accumulation_steps
            self.accelerator.backward(loss)
            return loss.detach() * next(left, 1)

    return Own


@pytest.mark.parametrize("factors", [(), (1, 1, 1, 1, 1, math.nan)], ids=["finite", "one NaN"])
@pytest.mark.parametrize("logging_nan_inf_filter", [True, False])
def test_a_training_step_of_the_users_own_is_logged(factors, logging_nan_inf_filter, tmp_path):
    """Losses and ``train_loss`` are those of the stock Trainer, whose filter they pass."""
    logs, metrics = [], []
    for kind in (Trainer, MFTrainer):
        trainer = new_trainer(
            own_step(kind, factors),
            tmp_path,
            max_grad_norm=0.0,
            logging_nan_inf_filter=logging_nan_inf_filter,
        )
        run = train(trainer)
        logs.append(values(run, "loss"))
        metrics.append(run.result.training_loss)
        assert trainer.args.logging_nan_inf_filter is logging_nan_inf_filter

    assert len(logs[0]) == len(logs[1]) == 4
    if not factors or logging_nan_inf_filter:
        assert logs[1] == pytest.approx(logs[0])
        assert metrics[1] == pytest.approx(metrics[0])
    else:
        assert [math.isnan(loss) for loss in logs[1]] == [math.isnan(loss) for loss in logs[0]]


def test_a_step_that_sometimes_calls_super(tmp_path):
    """Losses of micro-batches with and without a call of ``super`` are in one mean."""
    runs = []
    for kind in (Trainer, MFTrainer):
        own = own_step(kind)

        class Sometimes(own):
            calls = 0

            def training_step(self, *args, **keywords):
                self.calls += 1
                method = super() if self.calls % 2 else super(type(self).__mro__[1], self)
                return method.training_step(*args, **keywords)

        runs.append(train(new_trainer(Sometimes, tmp_path, max_grad_norm=0.0)))

    assert_same_log(*runs)
    assert_same_weights(*runs)
