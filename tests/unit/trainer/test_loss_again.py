"""A loss of the user's own is computed again by a twin of the Trainer, which leaves no trace."""

import math
from collections import defaultdict, deque

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import TrainingArguments

from mfwrap.callbacks import MetricsRecorder, TrainingStateMonitor
from mfwrap.trainer import MFTrainer
from mfwrap.trainer.loss_again import loss_of_batch
from support.spoilt.blocks import records_of

ROWS = [{"inputs": torch.tensor([n / 16, 1.0]), "labels": n % 2, "share": 0.5} for n in range(16)]


class Network(nn.Module):
    """A network that returns no loss."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(2, 2)

    def forward(self, inputs):
        return self.layer(inputs)


class Weighted(MFTrainer):
    """Computes the loss from a column that the network does not get, and keeps books."""

    number = 0

    def compute_loss(self, model, inputs, return_outputs=None, **_):
        labels, share = inputs.pop("labels"), inputs.pop("share")
        losses = functional.cross_entropy(model(**inputs), labels, reduction="none")
        loss = (losses * -share.log()).mean()
        self.number += 1
        self.books["train"]["loss"].append(loss.item())
        self.recent.append(loss.item())
        self.total += loss.detach()
        self.attached.report_losses({"weighted": loss})
        self.log({"own": loss.item()})
        return loss


def trainer_of(folder, rows=ROWS, *, kind=Weighted, monitors=True, **arguments):
    """Return a trainer of eight steps with two micro-batches of one row each."""
    settings = TrainingArguments(
        str(folder),
        max_steps=4,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        train_sampling_strategy="sequential",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        remove_unused_columns=False,
        **arguments,
    )
    callbacks = [MetricsRecorder(folder)]
    callbacks += [TrainingStateMonitor(folder=folder, replay=True)] if monitors else []
    trainer = kind(Network(), settings, train_dataset=rows, callbacks=callbacks)
    trainer.books = {"train": defaultdict(list)}
    trainer.recent, trainer.total = deque(maxlen=64), torch.zeros(())
    return trainer


def with_share(share, row=9):
    """Return the rows, one of them with another share: row 1 of micro-batch 0 of step 3."""
    return [dict(each, share=share) if n == row else each for n, each in enumerate(ROWS)]


@pytest.mark.parametrize(("share", "loss"), [(0.0, math.inf), (-1.0, math.nan)])
def test_the_row_of_a_loss_that_is_not_finite(tmp_path, share, loss):
    """All columns are finite, and the logarithm of one is not."""
    trainer_of(tmp_path, with_share(share)).train()
    (record,) = records_of(tmp_path)

    assert (record["step"], record["cause"], record["micro_batch"]) == (3, "loss", 0)
    (row,) = record["samples"]
    assert (row["micro_batch"], row["row"], row["index"], row["position"]) == (0, 1, 9, 9)
    assert str(row["loss"]) in {str(loss), repr(loss)}
    assert record["replay_detail"] == "the loss is computed outside of the network"


def test_a_run_is_the_same_with_and_without(tmp_path):
    """Weights, log, records, and what the trainer has counted."""
    runs = []
    for monitors in (True, False):
        folder = tmp_path / str(monitors)
        trainer = trainer_of(folder, with_share(0.0), monitors=monitors)
        trainer.train()
        log = trainer.state.log_history[:-1]  # the last entry has times
        books = dict(trainer.books["train"]), list(trainer.recent), trainer.total.item()
        weights = [weight.tolist() for weight in trainer.model.parameters()]
        metrics = (folder / "metrics.jsonl").read_text()
        runs.append(str((trainer.number, log, books, weights, metrics)))
    assert len(records_of(tmp_path / "True")) == 1
    assert runs[0] == runs[1]


def test_whose_loss_is_computed_again(tmp_path):
    """Only one of the user's own, of batches that the data loader has made."""

    class Making(Weighted):
        def _prepare_inputs(self, inputs):
            return super()._prepare_inputs(inputs)

    assert loss_of_batch(trainer_of(tmp_path / "a")) is not None
    assert loss_of_batch(trainer_of(tmp_path / "b", kind=MFTrainer)) is None
    assert loss_of_batch(trainer_of(tmp_path / "c", kind=Making)) is None


def test_a_loss_function_that_counts_targets(tmp_path):
    """It gets the number of targets of the batch."""
    trainer = trainer_of(tmp_path, kind=MFTrainer)
    trainer.compute_loss_func = lambda logits, labels, num_items_in_batch: (
        functional.cross_entropy(logits, labels, reduction="sum") / num_items_in_batch
    )
    run = loss_of_batch(trainer)
    rows = {"inputs": torch.ones(3, 2), "labels": torch.tensor([0, 1, -100])}
    trainer.model_wrapped = trainer.model
    expected = functional.cross_entropy(trainer.model(rows["inputs"]), rows["labels"])

    assert run(dict(rows)).item() == pytest.approx(expected.item())
