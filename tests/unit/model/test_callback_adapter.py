"""MindSpore's callbacks in a Trainer hear what they hear in `Model`."""

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from mfwrap.callbacks import EarlyStopping, History, as_trainer_callback
from mfwrap.outputs import StepOutput
from mfwrap.trainer import MFTrainer
from support.model_runs import Notes


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x, labels):
        return {"loss": (self.linear(x) - labels).square().mean(), "logits": self.linear(x)}


def train(kind, folder, callbacks, num_samples=16, **settings):
    """Train with batches of eight."""
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
def test_events_in_mindspores_order(kind, strategy, tmp_path):
    """An epoch ends after its evaluation, with its metrics."""
    notes = Notes("cur_epoch_num", "cur_step_num", "batch_num", "epoch_num", "metrics")
    train(kind, tmp_path, [as_trainer_callback(notes)], eval_strategy=strategy)

    assert notes.calls == ["on_train_begin", *EPOCH, *EPOCH, "on_train_end"]
    told = dict(zip(enumerate(notes.calls), notes.told, strict=True))
    ends = [facts for (_, call), facts in told.items() if call == "on_train_epoch_end"]
    assert [facts[:4] for facts in ends] == [(1, 2, 2, 2), (2, 4, 2, 2)]
    for facts in ends:
        assert (facts[4] is not None and "eval_loss" in facts[4]) is (strategy == "epoch")
    assert {type(output) for output in notes.outputs} == {
        StepOutput if kind is MFTrainer else type(None)
    }


def test_accumulated_batches_are_one_step(tmp_path):
    """A step is an update."""
    notes = Notes("batch_num", "cur_step_num")
    train(Trainer, tmp_path, [as_trainer_callback(notes)], gradient_accumulation_steps=2)

    assert notes.calls.count("on_train_step_end") == 2
    assert notes.told[-1] == (1, 2)


def test_a_stop_is_the_trainers(tmp_path):
    """At once, and after an evaluation."""
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


def test_a_metric_is_found_by_its_own_name(tmp_path):
    """A Trainer puts eval_ before it."""
    stopping = EarlyStopping("runtime", mode="max", min_delta=1e9)
    train(Trainer, tmp_path, [as_trainer_callback(stopping)], eval_strategy="epoch")

    assert stopping.stopped_epoch == 2


def test_two_of_them_are_no_two_of_one_class(caplog):
    """So a Trainer does not warn."""
    one, other = as_trainer_callback(History()), as_trainer_callback(EarlyStopping())

    assert type(one).__name__ == "AdaptedHistory"
    assert type(one) is not type(other)


def test_only_callbacks_are_adapted():
    """Anything else is refused."""
    with pytest.raises(TypeError, match="`callback` must be a Callback, got 3 of type int"):
        as_trainer_callback(3)
