"""Callbacks of MFTrainer get each step's output, are restored in place, and may raise."""

import json
import re
import signal

import pytest
import torch
from torch import nn
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback
from transformers.trainer_callback import ExportableState

from mfwrap import LocalNormStepOutput, StepConfig, StepOutput, StepReport
from mfwrap.callbacks import MFLossMonitor
from mfwrap.trainer import MFTrainer
from support.trainer_runs import (
    Counting,
    Run,
    assert_same_log,
    assert_same_weights,
    new_trainer,
    spoilt_llama,
    train,
    values,
)

EVENTS = [name for name in vars(TrainerCallback) if name.startswith("on_")]


class Keywords(TrainerCallback):
    """Record the step's output and report, and any other event that gets an output."""

    def __init__(self) -> None:
        self.steps: list[tuple[StepOutput, StepReport]] = []
        self.others: set[str] = set()


def _noting(event):
    def note(self, args, state, control, **keywords):
        if event == "on_step_end":
            self.steps.append((keywords["step_output"], keywords["step_report"]))
        else:
            self.others |= {event} & ({event} if "step_output" in keywords else set())

    return note


for _event in EVENTS:
    setattr(Keywords, _event, _noting(_event))


class Strict(TrainerCallback):
    """Take ``step_output`` and ``step_report`` as named parameters."""

    def __init__(self) -> None:
        self.overflows: list[torch.Tensor] = []

    def on_step_end(self, *_, step_output, step_report, model, **__):
        assert isinstance(step_report, StepReport)
        assert model.training
        self.overflows.append(step_output.overflow)


def test_every_callback_gets_the_step_at_its_end(tmp_path):
    """Every callback gets each step's output: instances, classes, and callbacks added later."""
    given, added = Keywords(), Strict()
    trainer = new_trainer(
        MFTrainer, tmp_path, callbacks=[given, Strict], model=spoilt_llama([1] * 4 + [float("inf")])
    )
    trainer.add_callback(added)
    train(trainer)

    from_class = next(c for c in trainer.callback_handler.callbacks if type(c) is Strict)
    for overflows in (from_class.overflows, added.overflows):
        assert [overflow.item() for overflow in overflows] == [False, True, False, False]
    assert [report.applied_updates.item() for _, report in given.steps] == [1, 1, 2, 3]
    assert all(report.output is output for output, report in given.steps)
    assert given.others == set()


def test_what_they_get_is_what_is_logged(tmp_path):
    """Callbacks get the loss, norm, rate and local norms that are logged."""
    keywords = Keywords()
    step = StepConfig(local_norm=True, local_norm_groups="layer")
    trainer = new_trainer(MFTrainer, tmp_path, callbacks=[keywords], extras={"step": step})
    run = train(trainer)

    outputs = [output for output, _ in keywords.steps]
    assert all(isinstance(output, LocalNormStepOutput) for output in outputs)
    found = {
        "loss": [output.loss.item() for output in outputs],
        "grad_norm": [output.global_norm.item() for output in outputs],
        "learning_rate": [output.learning_rate.item() for output in outputs],
    }
    names = keywords.steps[0][1].local_norm_names
    norms = zip(*(output.local_norm.tolist() for output in outputs), strict=True)
    found |= {f"local_norm/{name}": list(each) for name, each in zip(names, norms, strict=True)}
    for name, expected in found.items():
        assert values(run, name) == pytest.approx(expected, rel=1e-6), name


def test_loss_monitor(tmp_path, caplog):
    """`MFLossMonitor` prints a record of each update, with overflow and loss scale."""
    caplog.set_level("INFO")
    model = spoilt_llama([1] * 4 + [float("nan")])
    settings = {"fp16": True, "logging_strategy": "no", "model": model}
    train(new_trainer(MFTrainer, tmp_path, callbacks=[MFLossMonitor()], **settings))
    lines = [r.getMessage() for r in caplog.records if "Epoch:[" in r.getMessage()]

    pattern = re.compile(r"step:\[ *(\d+)/.*overflow cond: (\w+), loss_scale: ([\d.]+)")
    assert [pattern.search(line).groups() for line in lines] == [
        ("1", "False", "65536.0"),
        ("2", "True", "32768.0"),
        ("3", "False", "32768.0"),
        ("4", "False", "32768.0"),
    ]
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


class Raises(TrainerCallback):
    """Raise once, at one event."""

    def __init__(self, event: str) -> None:
        def fail(args, state, control, **_):
            delattr(self, event)
            msg = "error raised by a callback"
            raise OSError(msg)

        setattr(self, event, fail)


@pytest.mark.parametrize(
    "event", ["on_train_begin", "on_optimizer_step", "on_step_end", "on_log", "on_train_end"]
)
def test_a_callback_that_raises_ends_training_with_its_error(event, tmp_path):
    """A callback's error ends training and restores settings, so the trainer can train again."""
    before = signal.getsignal(signal.SIGTERM)
    trainer = new_trainer(MFTrainer, tmp_path, callbacks=[Raises(event)])

    with pytest.raises(OSError, match="error raised by a callback"):
        trainer.train()
    assert trainer.args.logging_nan_inf_filter is True
    assert signal.getsignal(signal.SIGTERM) is before
    run = train(trainer)
    assert values(run, "applied_updates") == [1, 2, 3, 4]


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize(
    "settings",
    [{}, {"bf16": True, "max_grad_norm": 0.0}, {"fp16": True, "optim": "adafactor"}],
    ids=["float32", "bf16", "fp16, Adafactor"],
)
def test_training_again_is_what_it_is_in_the_stock_trainer(settings, tmp_path):
    """A second ``train`` gives the stock Trainer's results and counts updates from 1 again."""

    def twice(kind) -> tuple[Run, Run]:
        trainer = new_trainer(kind, tmp_path, lr_scheduler_type="cosine", **settings)
        return train(trainer), train(trainer)

    for stock, ours in zip(twice(Trainer), twice(MFTrainer), strict=True):
        assert_same_log(stock, ours)
        assert_same_weights(stock, ours, difference=0.0 if "bf16" in settings else 1e-6)
        assert values(ours, "applied_updates") == [1, 2, 3, 4]


class Patient(EarlyStoppingCallback):
    """Stop early, and record the patience counter at the start of a training."""

    def on_train_begin(self, args, state, control, **keywords):
        super().on_train_begin(args, state, control, **keywords)
        self.counter_at_begin = self.early_stopping_patience_counter


def evaluated(folder, callbacks, **settings) -> Trainer:
    """Return a trainer whose evaluation loss improves enough at the first evaluation only."""
    often = {"eval_steps": 1, "save_steps": 1, "eval_strategy": "steps", "save_strategy": "steps"}
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss"}
    settings = {"restore_callback_states_from_checkpoint": True} | settings
    return new_trainer(
        MFTrainer, folder, callbacks=callbacks, data=Counting(80), **often, **best, **settings
    )


def test_patience_goes_on_where_it_was(tmp_path):
    """A resumed run stops early at the same step as a run that was never stopped."""
    first = evaluated(tmp_path, [Patient(4, 100.0)], max_steps=8)
    train(first)
    assert first.state.global_step == 5
    again = Patient(4, 100.0)
    second = evaluated(tmp_path, [again], max_steps=8)
    train(second, resume=tmp_path / "checkpoint-3")

    assert again.counter_at_begin == 2
    assert second.state.global_step == 5


class Counter(TrainerCallback, ExportableState):
    """Add `stride` to a count at each step."""

    def __init__(self, name: str, stride: int) -> None:
        self.name, self.stride, self.count = name, stride, 0

    def on_step_end(self, *_, **__):
        self.count += self.stride

    def state(self):
        arguments = {"name": self.name, "stride": self.stride}
        return {"args": arguments, "attributes": {"count": self.count}}


def test_callbacks_are_restored_in_place(tmp_path):
    """Resuming restores the callbacks' states and keeps the objects and their order."""

    def counters() -> list[Counter]:
        return [Counter("ones", 1), Counter("tens", 10)]

    saved = {"save_strategy": "steps", "save_steps": 2}
    saved["restore_callback_states_from_checkpoint"] = True
    train(new_trainer(MFTrainer, tmp_path, callbacks=counters(), **saved))
    held = counters()
    trainer = new_trainer(MFTrainer, tmp_path, callbacks=held, **saved, max_steps=6)
    before = list(trainer.callback_handler.callbacks)
    train(trainer, resume=tmp_path / "checkpoint-4")

    assert [counter.count for counter in held] == [6, 60]
    assert trainer.callback_handler.callbacks == before
    again = counters()
    trainer = new_trainer(MFTrainer, tmp_path, callbacks=again, **saved, max_steps=8)
    train(trainer, resume=tmp_path / "checkpoint-6")
    assert [counter.count for counter in again] == [8, 80]


def test_a_resumed_run_may_have_other_callbacks(tmp_path):
    """On resuming, a new callback starts fresh, and a removed callback's state is ignored."""
    saved = {"save_strategy": "steps", "save_steps": 2}
    train(new_trainer(MFTrainer, tmp_path, callbacks=[Counter("ones", 1)], **saved))
    monitor = MFLossMonitor()
    trainer = new_trainer(MFTrainer, tmp_path, callbacks=[monitor], **saved, max_steps=6)
    run = train(trainer, resume=tmp_path / "checkpoint-4")

    assert run.trainer.state.global_step == 6
    state = json.loads((tmp_path / "checkpoint-6" / "trainer_state.json").read_text())
    assert "MFLossMonitor" in state["stateful_callbacks"]


@pytest.mark.parametrize("restores", [False, True])
def test_the_order_to_stop_is_not_restored(restores, tmp_path):
    """A run that a callback stopped can be resumed, even if callback states are restored."""

    class Stops(TrainerCallback):
        def on_step_end(self, _args, state, control, **_):
            control.should_training_stop = state.global_step == 2
            control.should_save = True

    train(new_trainer(MFTrainer, tmp_path, callbacks=[Stops()]))
    trainer = new_trainer(MFTrainer, tmp_path, restore_callback_states_from_checkpoint=restores)
    train(trainer, resume=tmp_path / "checkpoint-2")

    assert trainer.state.global_step == 4


class Tied(nn.Module):
    """A plain network with a tied weight, which a Trainer cannot save."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, 4), nn.Linear(4, 32)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids, labels, attention_mask=None):
        """Return the loss."""
        logits = self.head(self.embedding(input_ids))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


@pytest.mark.parametrize("kind", [Trainer, MFTrainer])
def test_a_checkpoint_that_a_callback_cancels_is_not_written(tmp_path, kind):
    """A callback can cancel a step's checkpoint in ``on_log``, also at the end of an epoch.

    Writing it would raise an error: the network cannot be saved.
    """

    class Cancels(TrainerCallback):
        def on_log(self, _args, _state, control, **_):
            control.should_save = False

    saves = {"save_strategy": "steps", "save_steps": 1, "max_steps": -1, "num_train_epochs": 2}
    trainer = new_trainer(
        kind, tmp_path, model=Tied(), data=Counting(16, 4), callbacks=[Cancels()], **saves
    )
    train(trainer)

    assert trainer.state.global_step == 4
    assert list(tmp_path.iterdir()) == []
