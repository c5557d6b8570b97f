"""MindSpore's callbacks get the same calls and parameters from `Model` and from a Trainer."""

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from mfwrap.callbacks import EarlyStopping, History
from mfwrap.mindspore.callback import Callback, CallbackParameters, RunContext, as_trainer_callback
from mfwrap.outputs import StepOutput
from mfwrap.trainer import MFTrainer
from support.model_runs import HOOKS, Notes


def test_parameters_are_keys_and_attributes():
    """Each run parameter can be set and read as a key and as an attribute."""
    parameters = CallbackParameters(cur_step_num=1)
    parameters.own = 2
    parameters["other"] = 3

    assert (parameters.cur_step_num, parameters["own"], parameters.other) == (1, 2, 3)
    assert not hasattr(parameters, "metrics")
    with pytest.raises(AttributeError, match=r"no `metrics`; they have .*'cur_step_num'"):
        _ = parameters.metrics


def test_a_stop_stays_requested():
    """A request to stop is remembered."""
    context = RunContext(CallbackParameters())
    assert not context.get_stop_requested()
    context.request_stop()

    assert context.get_stop_requested()


@pytest.mark.parametrize("hook", HOOKS)
def test_hooks_call_the_older_names(hook):
    """A hook such as `on_train_step_end` calls the hook with the older name, `step_end`."""
    calls = []
    older = hook.replace("on_train_", "").replace("on_eval_", "")
    callback = type("Older", (Callback,), {older: lambda _, context: calls.append(context)})()
    context = RunContext(CallbackParameters())
    getattr(callback, hook)(context)

    assert calls == [context]


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x, labels):
        return {"loss": (self.linear(x) - labels).square().mean(), "logits": self.linear(x)}


def train(kind, folder, callbacks, num_samples=16, **settings):
    """Train for two epochs in batches of eight."""
    arguments = TrainingArguments(
        str(folder),
        report_to="none",
        use_cpu=True,
        save_strategy="no",
        **{"num_train_epochs": 2, "disable_tqdm": True, **settings},
    )
    data = [{"x": torch.ones(2), "labels": torch.ones(1)}] * num_samples
    trainer = kind(
        Regression(), arguments, train_dataset=data, eval_dataset=data, callbacks=callbacks
    )
    trainer.train()
    return trainer


STEP = ["on_train_step_begin", "on_train_step_end"]
EPOCH = ["on_train_epoch_begin", *STEP, *STEP, "on_train_epoch_end"]


@pytest.mark.parametrize("kind", [Trainer, MFTrainer])
@pytest.mark.parametrize("strategy", ["no", "epoch"])
def test_a_trainer_sends_events_in_mindspores_order(kind, strategy, tmp_path):
    """`on_train_epoch_end` is called after the epoch's evaluation, and gets its metrics."""
    notes = Notes("cur_epoch_num", "cur_step_num", "batch_num", "epoch_num", "metrics")
    train(kind, tmp_path, [as_trainer_callback(notes)], eval_strategy=strategy)

    assert notes.calls == ["on_train_begin", *EPOCH, *EPOCH, "on_train_end"]
    facts_at = dict(zip(enumerate(notes.calls), notes.told, strict=True))
    ends = [facts for (_, call), facts in facts_at.items() if call == "on_train_epoch_end"]
    assert [facts[:4] for facts in ends] == [(1, 2, 2, 2), (2, 4, 2, 2)]
    for facts in ends:
        assert (facts[4] is not None and "eval_loss" in facts[4]) is (strategy == "epoch")
    assert {type(output) for output in notes.outputs} == {
        StepOutput if kind is MFTrainer else type(None)
    }


def test_accumulated_batches_are_one_step(tmp_path):
    """A step is an update, not a micro-batch."""
    notes = Notes("batch_num", "cur_step_num")
    train(Trainer, tmp_path, [as_trainer_callback(notes)], gradient_accumulation_steps=2)

    assert notes.calls.count("on_train_step_end") == 2
    assert notes.told[-1] == (1, 2)


def test_a_stop_stops_the_trainer(tmp_path):
    """A stop that is requested after a step or after an evaluation ends the training there."""
    notes = Notes(stop_at=1)
    train(Trainer, tmp_path, [as_trainer_callback(notes)])
    assert notes.calls.count("on_train_step_end") == 1

    history = History()
    stopping = EarlyStopping(min_delta=1e3)
    callbacks = [as_trainer_callback(callback) for callback in (history, stopping)]
    trainer = train(MFTrainer, tmp_path, callbacks, eval_strategy="epoch", num_train_epochs=9)
    assert trainer.state.global_step == 4
    assert history.epoch == {"epoch": [1, 2]}
    assert len(history.history["eval_loss"]) == 2
    assert stopping.stopped_epoch == 2


def test_a_metric_is_found_without_its_prefix(tmp_path):
    """A Trainer adds ``eval_`` to the names of metrics; a callback may leave the prefix out."""
    stopping = EarlyStopping("runtime", mode="max", min_delta=1e9)
    train(Trainer, tmp_path, [as_trainer_callback(stopping)], eval_strategy="epoch")

    assert stopping.stopped_epoch == 2


def test_each_adapted_class_is_a_class_of_its_own():
    """Two adapted callbacks have different classes, so that a Trainer does not warn about them."""
    one, other = as_trainer_callback(History()), as_trainer_callback(EarlyStopping())

    assert type(one).__name__ == "AdaptedHistory"
    assert type(one) is not type(other)


def test_only_callbacks_are_adapted():
    """Anything but a `Callback` is refused."""
    with pytest.raises(TypeError, match="`callback` must be a Callback, got 3 of type int"):
        as_trainer_callback(3)
