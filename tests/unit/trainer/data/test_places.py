"""An anomaly tells where the rows that it names are in the training data."""

import bisect
import itertools
import json

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset
from transformers import TrainerCallback

from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.records.skipped_rows import RowPlace, SkippedRow
from mfwrap.trainer import MFTrainer
from mfwrap.trainer.data.places import NotedRows
from support.ranks.named_rows import (
    NUM_ROWS,
    Numbered,
    NumberedRows,
    samples_of,
    samples_on_rank,
)
from support.trainer_runs import new_trainer

SEED, NUM_EPOCHS = 42, 3
SIZES = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}


def order_of(epoch, *, shuffles=True):
    """Return the order of the rows in an epoch, as torch's sampler shuffles them."""
    generator = torch.Generator().manual_seed(SEED + epoch)
    return (
        torch.randperm(NUM_ROWS, generator=generator).tolist() if shuffles else [*range(NUM_ROWS)]
    )


def trained(
    folder,
    bad,
    *,
    kind=MFTrainer,
    skip_rows=None,
    growth=None,
    resume=None,
    data=None,
    callbacks=(),
    replay=True,
    model=None,
    **arguments,
):
    """Train for three epochs, and return the trainer."""
    monitor = TrainingStateMonitor(replay=replay, check_for_nan_in_loss_and_grad=False)
    trainer = new_trainer(
        kind,
        folder,
        model=Numbered() if model is None else model,
        data=NumberedRows(bad) if data is None else data,
        callbacks=[monitor, *callbacks],
        extras={"data_collator": None, "skip_rows": skip_rows, "rampup_batch_size": growth},
        **SIZES | {"max_steps": -1, "num_train_epochs": NUM_EPOCHS} | arguments,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def places(samples):
    """Return index, epoch and position of samples."""
    return [tuple(map(sample.get, ("index", "epoch", "position"))) for sample in samples]


def expected_places(bad, epochs=range(NUM_EPOCHS), *, shuffles=True):
    """Return the places of a row by the orders of the epochs."""
    return [(bad, epoch, order_of(epoch, shuffles=shuffles).index(bad)) for epoch in epochs]


@pytest.mark.parametrize(
    ("bad", "arguments"),
    [
        (5, {}),
        (17, {}),
        (11, {"train_sampling_strategy": "sequential"}),
        pytest.param(5, {"dataloader_num_workers": 2}, marks=pytest.mark.slow),
        pytest.param(
            8,
            {
                "dataloader_num_workers": 2,
                "dataloader_prefetch_factor": 3,
            },
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_named_row_is_found_and_left_out(tmp_path, bad, arguments):
    """Index, epoch and position are those of the bad row; a run without them never sees the row."""
    first = trained(tmp_path / "first", bad, **arguments)
    samples = samples_of(tmp_path / "first")
    shuffles = "train_sampling_strategy" not in arguments

    assert places(samples) == expected_places(bad, shuffles=shuffles)
    # 26 rows are 5 updates, the last one of 2 rows.
    assert [sample["step"] for sample in samples] == [
        5 * epoch + position // 6 + 1 for _, epoch, position in places(samples)
    ]
    assert [(s["micro_batch"], s["row"]) for s in samples] == [
        (position % 6 // 2, position % 2) for *_, position in places(samples)
    ]
    rows = [place for _, *place in places(samples)]
    second = trained(tmp_path / "second", bad, skip_rows=rows, **arguments)
    assert first.model.seen == set(range(NUM_ROWS))
    assert second.model.seen == set(range(NUM_ROWS)) - {bad}
    assert not samples_of(tmp_path / "second")


KEEP = {"remove_unused_columns": False}


class WeighedRows(NumberedRows):
    """Rows with a weight each, which is not finite for the bad row, and with a mask."""

    def __init__(self, bad, value):
        super().__init__(bad=-1)
        self._weight = {bad: value}

    def __getitem__(self, index):
        """Return a row."""
        extra = {
            "weight": torch.tensor([self._weight.get(index, 1.0), 1.0]),
            "mask": torch.tensor([0.0, -torch.inf]),
        }
        return super().__getitem__(index) | extra


class Weighing(MFTrainer):
    """Weighs the loss outside of the network, which does not get the weights."""

    def compute_loss(self, model, inputs, return_outputs=None, num_items_in_batch=None):
        """Return the loss of a micro-batch."""
        weight, _ = inputs.pop("weight"), inputs.pop("mask")
        output = model(**inputs)
        loss = output["loss"] * weight.mean() + weight.log().sum()
        return (loss, output) if return_outputs else loss


@pytest.mark.parametrize("value", [torch.nan, torch.inf, 0.0])
def test_a_row_that_the_network_does_not_get(tmp_path, value):
    """Columns that only the loss uses are looked at, too; zero is finite, its logarithm is not.

    Then the loss of the Trainer is computed again, row by row.
    """
    trained(tmp_path, 17, kind=Weighing, data=WeighedRows(17, value), **KEEP)
    first = json.loads((tmp_path / "anomalies.jsonl").read_text().splitlines()[0])

    assert first["step"] == expected_places(17)[0][2] // 6 + 1
    assert places(samples_of(tmp_path)) == expected_places(17)
    if value == 0:
        assert first["cause"] == "loss"
        return
    assert (first["cause"], first["where"], first["name"]) == ("data", "input", "weight")
    (sample,) = first["samples"]
    assert first["micro_batch"] == sample["micro_batch"]
    assert first["rows"] == [sample["row"]]


def test_rows_of_a_batch_that_grows(tmp_path):
    """Updates have 2, 4 and then 6 rows; a resume in the middle of an epoch finds the same."""
    settings = {"growth": {0: 2, 2: 4, 6: 6}, "save_strategy": "steps", "save_steps": 4}
    trained(tmp_path / "run", 5, **settings)
    samples = samples_of(tmp_path / "run")
    # Epochs of 26 rows: 2 * 2 + 4 * 4 + 6, then four times 6 and 2 rows.
    firsts = [[0, 2, 4, 8, 12, 16, 20], *[[0, 6, 12, 18, 24]] * 2]
    expected = [(0, firsts[0]), (7, firsts[1]), (12, firsts[2])]

    assert places(samples) == expected_places(5)
    for sample, (before, first_rows) in zip(samples, expected, strict=True):
        update = bisect.bisect_right(first_rows, sample["position"]) - 1
        of_update = sample["position"] - first_rows[update]
        assert sample["step"] == before + update + 1
        assert (sample["micro_batch"], sample["row"]) == divmod(of_update, 2)
    checkpoint = tmp_path / "run" / "checkpoint-8"
    trained(tmp_path / "again", 5, resume=str(checkpoint), **settings)
    later = [sample for sample in samples if sample["step"] > 8]
    assert places(samples_of(tmp_path / "again")) == places(later)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_a_run_that_resumes_within_an_epoch(tmp_path, workers):
    """After a resume in the middle of the second epoch, the places are the same as without it."""
    bad = order_of(1)[20]
    settings = {
        "save_strategy": "steps",
        "save_steps": 7,
        "dataloader_num_workers": workers,
    }
    trained(tmp_path, bad, **settings)
    whole = samples_of(tmp_path)
    assert places(whole) == expected_places(bad)
    # The resume removes the records of the steps after the checkpoint.
    trained(tmp_path, bad, resume=str(tmp_path / "checkpoint-7"), **settings)
    assert samples_of(tmp_path) == whole


def test_other_rows_that_are_left_out(tmp_path):
    """Rows, whole micro-batches and whole updates that are left out do not shift the places."""
    bad = order_of(0)[20]
    # A row, a whole update, the micro-batch before the bad row, and a row after it.
    skip_rows = [(0, position) for position in (1, *range(6, 12), 18, 19, 22)]
    skip_rows += [(1, position) for position in range(6) if order_of(1)[position] != bad]
    trained(tmp_path, bad, skip_rows=skip_rows)

    found = samples_of(tmp_path)
    assert places(found) == expected_places(bad)
    # The second of the five updates of epoch 0 is not made, and its fourth has two micro-batches.
    assert (found[0]["step"], found[0]["micro_batch"], found[0]["row"]) == (3, 0, 0)


def test_skipped_updates_and_a_callback_that_ends_epochs(tmp_path):
    """The places are right if the data begin later, and if a callback ends an epoch early."""

    class EndEpoch(TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            control.should_epoch_stop = state.global_step == 3

    bad = order_of(1)[8]
    trained(tmp_path, bad, callbacks=[EndEpoch()])
    expected = [place for place in expected_places(bad) if place[1] > 0 or place[2] < 18]
    assert places(samples_of(tmp_path)) == expected


def test_an_epoch_that_changes_between_a_step_and_its_judgement(tmp_path):
    """A bad row of the last update of an epoch has the place of this epoch."""
    bad = order_of(0)[25]
    trained(tmp_path, bad)

    assert places(samples_of(tmp_path))[0] == (bad, 0, 25)


def test_a_batch_with_indices(tmp_path):
    """The indices of a batch are kept; the place is added."""
    bad = 5
    trained(tmp_path, bad, data=NumberedRows(bad, with_indices=True))

    assert places(samples_of(tmp_path)) == [
        (1000 + index, epoch, position) for index, epoch, position in expected_places(bad)
    ]


class Stream(IterableDataset):
    """The rows in their order, without a length."""

    def __init__(self, bad):
        self._rows = NumberedRows(bad)

    def __iter__(self):
        return (self._rows[index % NUM_ROWS] for index in itertools.count())


class CallsTwice(MFTrainer):
    """A Trainer that calls the network twice for each micro-batch."""

    def compute_loss(self, model, inputs, *args, **keywords):
        """Return the mean of two losses."""
        once = super().compute_loss(model, inputs, *args, **keywords)
        return (once + model(**inputs)["loss"]) / 2


class Reorders(MFTrainer):
    """A Trainer that trains on other rows than those of its loader, as TRL's GRPO does."""

    def _prepare_inputs(self, inputs):
        prepared = super()._prepare_inputs(inputs)
        return {name: tensor.flip(0) for name, tensor in prepared.items()}


class Lists(BatchSampler):
    """A batch sampler whose batches have one or two rows."""

    def __iter__(self):
        for number, batch in enumerate(super().__iter__()):
            yield from [batch] if number % 2 else [batch[:1], batch[1:]]


class OwnBatches(MFTrainer):
    """A Trainer whose loader has another batch sampler."""

    def get_train_dataloader(self):
        """Return a loader of batches of one or two rows."""
        data = self.train_dataset
        batches = list(Lists(range(NUM_ROWS), 2, drop_last=False))
        return self.accelerator.prepare(DataLoader(data, batch_sampler=batches))


@pytest.mark.parametrize(
    "settings",
    [
        {"data": Stream(5), "max_steps": 12},
        {"kind": CallsTwice},
        {"kind": Reorders},
        {"kind": Reorders, "skip_rows": [(0, 0)]},
        {"kind": OwnBatches},
        {"ignore_data_skip": True},
    ],
    ids=["stream", "calls twice", "reorders", "also left out", "batches", "ignores"],
)
def test_rows_without_a_known_place(tmp_path, settings):
    """The row is named without index, epoch and position if these are unknown."""
    trained(tmp_path, 5, **settings)
    found = places(samples_of(tmp_path))

    assert found
    assert set(found) == {(None, None, None)}


class Iterates(TrainerCallback):
    """A callback that reads a batch of the loader after each step."""

    def on_step_end(self, args, state, control, train_dataloader=None, **_):
        """Read a batch."""
        next(iter(train_dataloader))


def test_a_callback_that_reads_the_loader_shifts_no_place(tmp_path):
    """Batches that a callback reads from the loader do not count as batches of the training."""
    trained(tmp_path, 5, train_sampling_strategy="sequential", callbacks=[Iterates()])

    assert places(samples_of(tmp_path)) == expected_places(5, shuffles=False)


def test_workers_that_are_far_ahead(tmp_path):
    """The rows of a step are known although workers make batches of much later steps already."""
    trainer = new_trainer(
        MFTrainer,
        tmp_path,
        data=NumberedRows(0),
        callbacks=[TrainingStateMonitor(replay=True, check_for_nan_in_loss_and_grad=False)],
        train_sampling_strategy="sequential",
        per_device_train_batch_size=1,
        gradient_accumulation_steps=3,
        dataloader_num_workers=1,
        dataloader_prefetch_factor=8,
    )
    noted = NotedRows(trainer)
    with noted.of_training():
        noted.begin()
        loader = trainer.get_train_dataloader()
        noted.begin_epoch(loader, 0, 0, 9, None, lambda _: None)
        batches = noted.noting(enumerate(loader.batch_sampler))
        # Two updates of three batches, as a step is judged in the next one, and those ahead.
        for _ in range(2 * 3 + 8):
            next(batches)
        found = noted.places(1, [1, 1, 1])

    assert found == [[RowPlace(row, SkippedRow(0, row))] for row in range(3)]


# On two ranks, an update of an epoch has positions 12 n to 12 n + 11; in each of its micro-batches
# of 4 rows, the first 2 are on rank 0. Row 26 fills up the last micro-batch.
@pytest.mark.parametrize("position", [13, 22])
def test_two_ranks(two_ranks, tmp_path, position):
    """Each row has the place that it has on its rank, also after a resume in mid-epoch."""
    bad = order_of(1)[position]
    settings = {**SIZES, "num_train_epochs": 3, "save_strategy": "steps", "save_steps": 4}
    samples, _ = two_ranks.run(samples_on_rank, str(tmp_path), bad, settings)[0]
    assert places(samples) == expected_places(bad)
    assert [sample["rank"] for sample in samples] == [
        position % 4 // 2 for *_, position in places(samples)
    ]
    assert [sample["step"] for sample in samples] == [
        3 * epoch + position // 12 + 1 for _, epoch, position in places(samples)
    ]

    checkpoint = str(tmp_path / "checkpoint-4")
    again, _ = two_ranks.run(samples_on_rank, str(tmp_path), bad, settings, checkpoint)[0]
    assert again == samples

    rows = [place for _, *place in places(samples)]
    del settings["save_strategy"]
    settings["skip_rows"] = rows
    fresh = two_ranks.run(samples_on_rank, str(tmp_path / "fresh"), bad, settings)
    assert set.union(*(seen for _, seen in fresh)) == set(range(NUM_ROWS)) - {bad}
