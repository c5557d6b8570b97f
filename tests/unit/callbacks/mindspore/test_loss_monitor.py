"""Each step prints MindSpore's line, and a non-finite loss ends the training."""

import logging

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainingArguments

from mfwrap import (
    DynamicLossScaleManager,
    DynamicLossScaleUpdateCell,
    Model,
    TrainOneStepWithLossScaleCell,
    WithLossCell,
)
from mfwrap.callbacks import Callback, LossMonitor, MFLossMonitor, as_trainer_callback
from mfwrap.trainer import MFTrainer
from support.host_reads import HostReads
from support.model_runs import batches, classifier, losses_by_hand, sgd


def train(callbacks, data=None, epochs=1, manager=None):
    """Train a small classifier."""
    network = classifier()
    model = Model(network, nn.CrossEntropyLoss(), sgd(network), loss_scale_manager=manager)
    model.train(epochs, batches(3) if data is None else data, callbacks=callbacks)


@pytest.mark.parametrize("manager", [None, DynamicLossScaleManager(2.0**10)])
def test_a_line_for_each_step(capsys, manager):
    """Each step prints its epoch, its number in the epoch and the loss in full precision."""
    train(LossMonitor(), epochs=2, manager=manager)
    network = classifier()
    losses = losses_by_hand(network, sgd(network), batches(3), 2)

    lines = capsys.readouterr().out.splitlines()
    assert [line.rpartition(" ")[0] for line in lines] == [
        f"epoch: {epoch} step: {step}, loss is" for epoch in (1, 2) for step in (1, 2, 3)
    ]
    found = [float(line.rpartition(" ")[2]) for line in lines]
    torch.testing.assert_close(found, [float(loss) for loss in losses], rtol=1e-5, atol=0)


def test_steps_between_lines_count_over_epochs(capsys):
    """Steps between lines are counted across epochs, as in MindSpore."""
    train(LossMonitor(2), epochs=2)

    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(",")[0] for line in lines] == [
        "epoch: 1 step: 2",
        "epoch: 2 step: 1",
        "epoch: 2 step: 3",
    ]


def test_zero_prints_none(capsys):
    """With `per_print_times=0`, only the metrics of evaluations are printed."""
    network = classifier()
    model = Model(network, nn.CrossEntropyLoss(), sgd(network), metrics={"loss"})
    model.fit(1, batches(2), batches(1), callbacks=LossMonitor(0))

    loss = model.eval(batches(1))["loss"]
    assert capsys.readouterr().out == f"Eval result: epoch 1, metrics: {{'loss': {loss}}}\n"


def with_a_nan():
    """Return three batches; the second has NaN inputs."""
    data = batches(3)
    return [data[0], (torch.full((8, 8), torch.nan), data[1][1]), data[2]]


def test_a_loss_that_is_not_finite_ends_the_training():
    """A non-finite loss raises MindSpore's error."""
    with pytest.raises(ValueError, match="In epoch: 1 step: 2, loss is NAN or INF, training"):
        train(LossMonitor(0), with_a_nan())


def test_a_skipped_update_does_not(capsys):
    """A non-finite loss of a skipped update is printed, and training continues."""
    train(LossMonitor(), with_a_nan(), manager=DynamicLossScaleManager(8.0))

    lines = capsys.readouterr().out.splitlines()
    assert (len(lines), lines[1]) == (3, "epoch: 1 step: 2, loss is nan")


class PlainStep(TrainOneStepWithLossScaleCell):
    """A custom step that returns MindSpore's plain tuple."""

    def __call__(self, *inputs):
        loss, overflow, scale = super().__call__(*inputs)
        return loss, overflow, scale


def plain_step(scale):
    """Return a model that trains with a `PlainStep`."""
    network = classifier()
    parts = WithLossCell(network, nn.CrossEntropyLoss())
    return Model(PlainStep(parts, sgd(network), scale))


def test_a_skipped_update_of_a_plain_tuple_does_not(capsys):
    """The second value of a plain tuple is the overflow flag; a skipped update does not raise."""
    model = plain_step(DynamicLossScaleUpdateCell(8.0, 2, 1000))
    model.train(1, with_a_nan(), callbacks=LossMonitor())

    lines = capsys.readouterr().out.splitlines()
    assert (len(lines), lines[1]) == (3, "epoch: 1 step: 2, loss is nan")


def test_a_plain_tuple_without_a_flag_ends_the_training():
    """Without an overflow flag, a non-finite loss ends the training."""

    class Losses(PlainStep):
        def __call__(self, *inputs):
            loss, _, _ = super().__call__(*inputs)
            return loss, loss + 1, loss + 2

    network = classifier()
    step = Losses(WithLossCell(network, nn.CrossEntropyLoss()), sgd(network), torch.tensor(8.0))
    with pytest.raises(ValueError, match="In epoch: 1 step: 2, loss is NAN or INF, training"):
        Model(step).train(1, with_a_nan(), callbacks=LossMonitor())


def test_mindformers_record_shows_a_plain_tuple(caplog):
    """`MFLossMonitor` shows overflow and loss scale of a plain tuple."""
    caplog.set_level(logging.INFO, "mfwrap.callbacks")
    model = plain_step(DynamicLossScaleUpdateCell(8.0, 2, 1000))
    model.train(1, with_a_nan(), callbacks=MFLossMonitor())

    lines = [line for line in caplog.messages if "overflow cond" in line]
    shown = [line.partition("overflow cond: ")[2].partition(", global")[0] for line in lines]
    assert shown == ["False, loss_scale: 8.0", "True, loss_scale: 4.0", "False, loss_scale: 4.0"]


def test_a_step_waits_for_no_loss():
    """No step synchronizes to print a loss."""
    counter = HostReads()
    names = []

    class Counted(Callback):
        # Count from the second step on: the first step allocates the buffers for copied values.
        def on_train_step_begin(self, run_context):
            if run_context.original_args().cur_step_num == 2:
                counter.__enter__()

        def on_train_step_end(self, run_context):
            if run_context.original_args().cur_step_num == 4:
                counter.__exit__(None, None, None)
                names.append(counter.names)

    train([LossMonitor(), Counted()], batches(4))
    assert names == [[]]


@pytest.mark.parametrize("value", [-1, 1.0, True, "1"])
def test_bad_arguments_are_refused_by_name(value):
    """A wrong argument raises a ValueError, as in MindSpore."""
    with pytest.raises(ValueError, match="`per_print_times` must be an int >= 0"):
        LossMonitor(value)


class Regression(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 1)

    def forward(self, x, labels):
        return {"loss": (self.linear(x) - labels).square().mean()}


def trainer(kind, folder, monitor):
    """Return a Trainer with the monitor."""
    arguments = TrainingArguments(
        str(folder), num_train_epochs=2, report_to="none", use_cpu=True, save_strategy="no",
        disable_tqdm=True,
    )  # fmt: skip
    return kind(
        Regression(),
        arguments,
        train_dataset=[{"x": torch.ones(2), "labels": torch.ones(1)}] * 16,
        callbacks=[as_trainer_callback(monitor)],
    )


def test_in_a_trainer(tmp_path, capsys):
    """In an `MFTrainer` the monitor prints the same lines."""
    trainer(MFTrainer, tmp_path, LossMonitor()).train()

    lines = [line for line in capsys.readouterr().out.splitlines() if "loss is" in line]
    assert [line.partition(",")[0] for line in lines] == [
        f"epoch: {epoch} step: {step}" for epoch in (1, 2) for step in (1, 2)
    ]


def test_in_a_stock_trainer_it_says_what_is_missing(tmp_path, capsys, caplog):
    """In a stock Trainer one warning says that no loss is printed."""
    with caplog.at_level(logging.WARNING, logger="mfwrap"):
        trainer(Trainer, tmp_path, LossMonitor()).train()

    assert len([line for line in caplog.messages if "LossMonitor prints no loss" in line]) == 1
    assert "loss is" not in capsys.readouterr().out
