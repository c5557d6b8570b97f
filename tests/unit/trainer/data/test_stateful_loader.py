"""Iterable data keep their place: a resume is exact, and reads no row before its place."""

import json
import random

import datasets
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset
from transformers import default_data_collator

from mfwrap.compatibility.foreign import ReleaseError
from mfwrap.trainer import MFTrainer
from mfwrap.trainer.data import stateful_loader
from mfwrap.trainer.data.stateful_loader import stateful_base
from support import trainer_runs
from support.ranks.processes import start_ranks
from support.ranks.stateful_data import (
    NUM_STEPS,
    SAVED,
    Stream,
    new_trainer,
    outcome,
    train_and_resume,
)
from support.trainer_runs import Counting

ROWS_OF_UPDATE = 8

# torchdata's loaders warn at their construction.
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")


@pytest.fixture
def _torchdata():
    pytest.importorskip("torchdata")


@pytest.mark.usefixtures("_torchdata")
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["own", "datasets"])
def test_a_resume_is_exact(tmp_path, kind, workers):
    """Weights, losses and rows are those of a training without a stop, in both passes."""
    whole = new_trainer(tmp_path / "run", kind=kind, workers=workers)
    whole.train()
    for step in SAVED:
        resumed = new_trainer(tmp_path / f"resumed_{step}", kind=kind, workers=workers, saves=False)
        resumed.train(resume_from_checkpoint=str(tmp_path / "run" / f"checkpoint-{step}"))

        assert outcome(resumed) == outcome(whole, after=step)
        if (kind, workers) == ("own", 0):
            # accelerate reads one batch ahead.
            rows = (NUM_STEPS - step) * ROWS_OF_UPDATE
            assert resumed.train_dataset.num_read == rows + ROWS_OF_UPDATE // 2


@pytest.mark.usefixtures("_torchdata")
def test_without_the_setting_a_checkpoint_is_read_from_its_start(tmp_path):
    """By default the rows before the place are read again, also for a checkpoint with a place."""
    whole = new_trainer(tmp_path / "run")
    whole.train()
    resumed = new_trainer(tmp_path / "resumed", saves=False, use_stateful_dataloader=False)
    resumed.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-4"))

    rows = outcome(whole, after=4)["seen"]
    assert [int(row) for row in outcome(resumed)["seen"]] == [int(row) for row in rows]
    assert resumed.train_dataset.num_read > (NUM_STEPS - 2) * ROWS_OF_UPDATE


@pytest.mark.usefixtures("_torchdata")
@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", ["own", "datasets"])
def test_two_ranks(tmp_path, kind, workers):
    """Rank 0 reads for both ranks, or each rank reads its shards."""
    settings = {"kind": kind, "workers": workers}
    if kind == "datasets":
        settings["accelerator_config"] = {"dispatch_batches": False}

    ranks = start_ranks(tmp_path, train_and_resume, settings)
    for process in ranks:
        process.join(240)  # longer than `run_ranks` waits: each rank starts workers twice
    codes = [process.exitcode for process in ranks]
    for process in ranks:
        process.kill()

    assert codes == [0, 0]
    for rank in range(2):
        resumed, whole = json.loads((tmp_path / f"outcome_{rank}.json").read_text())
        assert len(whole["seen"]) == 2 * ROWS_OF_UPDATE
        assert resumed == whole


class Tuples(IterableDataset):
    """Keep the state of Python's generator, which is a tuple."""

    def __iter__(self):
        return iter([{"x": torch.zeros(1), "labels": torch.zeros(1)}] * 8)

    def state_dict(self):
        """Return the state."""
        return {"rng": random.getstate()}

    def load_state_dict(self, _state_dict):
        """Do nothing."""


class Changing(Stream):
    """Keep values from the first row on that JSON would change, or cannot hold."""

    def __init__(self, name, value):
        super().__init__()
        self.later = {name: value}

    def state_dict(self):
        """Return the place, and the value once a row was read."""
        return super().state_dict() | (self.later if self._next else {})


def trained_on(dataset, folder):
    """Train on a data set with the setting."""
    settings = {"data_collator": default_data_collator, "use_stateful_dataloader": True}
    trainer_runs.new_trainer(MFTrainer, folder, data=dataset, extras=settings).train()


@pytest.mark.usefixtures("_torchdata")
def test_a_state_that_json_cannot_hold(tmp_path):
    """The part of the state is named before the first update."""
    with pytest.raises(ValueError, match=r"cannot be saved, because dataset_state\.rng is a tuple"):
        trained_on(Tuples(), tmp_path)


@pytest.mark.usefixtures("_torchdata")
@pytest.mark.parametrize(
    ("later", "says"),
    [
        (("counts", {0: 6}), r"dataset_state\.counts has the key 0"),
        (("last", np.int64(3)), r"dataset_state\.last is a int64"),
    ],
)
def test_a_later_state_that_json_cannot_hold(tmp_path, later, says):
    """The state of each checkpoint is checked, as a data set may change what it holds."""
    with pytest.raises(ValueError, match=f"cannot be saved, because {says}"):
        new_trainer(tmp_path, data=Changing(*later)).train()


class OwnLoader(MFTrainer):
    """A trainer with a data loader of its own."""

    def get_train_dataloader(self):
        """Return a loader of torch."""
        return DataLoader(self.train_dataset, batch_size=4)


@pytest.mark.usefixtures("_torchdata")
def test_a_data_loader_of_ones_own(tmp_path):
    """It keeps no state, which is said before the first update."""
    settings = {"data_collator": default_data_collator, "use_stateful_dataloader": True}
    trainer = trainer_runs.new_trainer(OwnLoader, tmp_path, data=Stream(), extras=settings)
    with pytest.raises(ValueError, match="own `get_train_dataloader`, got DataLoader; leave it"):
        trainer.train()


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"a": [1, {"b": torch.ones(1)}]}, "a[1].b is a Tensor"),
        ({"a": {0: 1}}, "a has the key 0"),
        ({"a": [None, True, 1, 0.5, "b", {}]}, None),
    ],
)
def test_what_json_can_hold(state, says):
    """A value of another type is named with its path."""
    assert stateful_loader._unstorable(state) == says


@pytest.mark.parametrize("is_interleaved", [True, False])
def test_a_shuffle_buffer_is_found(is_interleaved):
    """Also behind a `map`, and in one of several sets."""
    rows = datasets.Dataset.from_dict({"x": list(range(8))}).to_iterable_dataset()
    shuffled = rows.shuffle(seed=0, buffer_size=4).map(lambda row: row)
    if is_interleaved:
        shuffled = datasets.interleave_datasets([rows, shuffled])

    assert not stateful_loader._has_shuffle_buffer(rows)
    assert stateful_loader._has_shuffle_buffer(shuffled)


@pytest.mark.usefixtures("_torchdata")
def test_a_shuffle_buffer_is_said(tmp_path):
    """One sentence at the start says that its rows are lost, and what is exact."""
    rows = datasets.Dataset.from_dict({"x": [[0.0]] * 64, "labels": [[0.0]] * 64})
    shuffled = rows.to_iterable_dataset().shuffle(seed=0, buffer_size=4)
    with pytest.warns(UserWarning, match="leaves out the rows that were in the shuffle buffer"):
        new_trainer(tmp_path, data=shuffled, saves=False, max_steps=1).train()


def test_data_with_indices_are_refused(tmp_path, monkeypatch):
    """They need no state; without torchdata, the sentence says what to install."""
    available = "is_torchdata_stateful_dataloader_available"
    monkeypatch.setattr(stateful_loader, available, lambda: True)
    with pytest.raises(ValueError, match="needs an iterable data set, got Counting; leave it"):
        trained_on(Counting(8), tmp_path)
    monkeypatch.setattr(stateful_loader, available, lambda: False)
    with pytest.raises(ReleaseError, match=r"needs torchdata 0\.8 or newer; pip install torchdata"):
        trained_on(Tuples(), tmp_path)


def test_other_loaders_have_no_state():
    """A loader of torch has no place of its own."""
    assert stateful_base(DataLoader(Counting(8))) is None
