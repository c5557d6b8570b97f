"""Trainings that go back from 20 planted windows of bad rows end as those without the rows."""

import json
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset

from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.trainer import MFTrainer, Rollback
from support.trainer_runs import new_trainer

NUM_ROWS = 48
MICRO_BATCH = 2


class Window(NamedTuple):
    """A window of bad rows, and the training that goes back from it."""

    kind: str
    """Kind of the anomaly that the rows cause."""

    first: int
    """Position of the first bad row in the order of the first epoch."""

    num_rows: int
    accumulation: int = 1
    save_steps: int = 1
    before: int = 0
    after: int = 0
    leave_out: str = "update"
    num_workers: int = 0
    num_epochs: int = 1

    def indices(self):
        """Return the indices of the bad rows in the data set."""
        order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(42))
        return set(order[self.first : self.first + self.num_rows].tolist())


LOSS, GRADIENT, SPIKE = "loss_not_finite", "gradient_not_finite", "spike"

FACTORS = {LOSS: torch.nan, GRADIENT: 0.0, SPIKE: 1e3}
"""Factor of bad rows by kind. The gradient of `Noisy` is NaN at 0, and its loss is finite."""

WINDOWS = [
    Window(LOSS, 9, 1),
    Window(SPIKE, 24, 2),
    Window(LOSS, 18, 6, accumulation=2, save_steps=2, before=1, after=1, num_epochs=2),
    Window(SPIKE, 26, 4, num_workers=2, leave_out="rows"),
    Window(LOSS, 12, 2, save_steps=3),
    Window(LOSS, 46, 2),
    Window(LOSS, 5, 3, leave_out="rows"),
    Window(LOSS, 8, 8, accumulation=2),
    Window(LOSS, 31, 9, accumulation=4, save_steps=2, num_epochs=2),
    Window(LOSS, 20, 3, accumulation=2, leave_out="rows", num_workers=2),
    Window(LOSS, 20, 1, num_workers=2, save_steps=4, num_epochs=2),
    Window(LOSS, 30, 4, before=2, after=3),
    Window(GRADIENT, 15, 5, accumulation=2, leave_out="rows", num_epochs=2),
    Window(GRADIENT, 40, 8, save_steps=5, after=2),
    Window(SPIKE, 25, 1, num_epochs=2),
    Window(SPIKE, 30, 6, save_steps=2, before=2),
    Window(SPIKE, 33, 3, save_steps=3, after=2, leave_out="rows"),
    Window(SPIKE, 28, 8, num_workers=2, num_epochs=2),
    Window(SPIKE, 44, 8, accumulation=2, save_steps=2, num_epochs=2),
    Window(SPIKE, 46, 2, accumulation=2, before=1, after=1, num_epochs=2),
]


class Rows(Dataset):
    """Rows of which those of a window are bad."""

    def __init__(self, window):
        self._bad = window.indices()
        self._factor = FACTORS[window.kind]

    def __len__(self):
        return NUM_ROWS

    def __getitem__(self, index):
        row = torch.arange(3.0).add(index % 5).cos()
        factor = self._factor if index in self._bad else 1.0
        return {"inputs": row * factor, "labels": row.flip(0)}


class Noisy(nn.Module):
    """A small network whose loss depends on random numbers."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(9.0).sin().reshape(3, 3))

    def forward(self, inputs, labels):
        """Return the loss."""
        noisy = inputs + 0.1 * torch.rand(inputs.shape)
        root = (self.weight.sum() * inputs.abs().sum(1)).abs().sqrt().mean()
        return {"loss": (noisy @ self.weight - labels).square().mean() + 0.01 * root}


def trained(folder, window, **extras):
    """Train, and return the trainer."""
    trainer = new_trainer(
        MFTrainer,
        folder,
        model=Noisy(),
        data=Rows(window),
        callbacks=[TrainingStateMonitor(replay=window.leave_out == "rows")],
        extras={"data_collator": None, **extras},
        per_device_train_batch_size=MICRO_BATCH,
        gradient_accumulation_steps=window.accumulation,
        learning_rate=1e-4,
        save_strategy="steps",
        save_steps=window.save_steps,
        dataloader_num_workers=window.num_workers,
        max_steps=-1,
        num_train_epochs=window.num_epochs,
    )
    trainer.train()
    return trainer


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize("window", WINDOWS, ids=lambda window: f"{window.kind}-{window.first}")
def test_a_window(tmp_path, window):
    """Weights and optimizer are bitwise those of a run that leaves the rows out from its start."""
    rollback = Rollback(
        kinds=(window.kind,),
        max_rollbacks=20,
        updates_before=window.before,
        updates_after=window.after,
        leave_out=window.leave_out,
    )
    trainer = trained(tmp_path / "run", window, rollback=rollback)
    fresh = trained(tmp_path / "fresh", window, skip_rows=tmp_path / "run" / "skip_rows.jsonl")

    done = json.loads((tmp_path / "run" / "rollbacks.json").read_text())["rollbacks"]
    left_out = {position for one in done for epoch, position in one["rows"] if epoch == 0}
    assert {one["kind"] for one in done} == {window.kind}
    assert left_out >= set(range(window.first, min(window.first + window.num_rows, NUM_ROWS)))
    assert trainer.state.global_step == fresh.state.global_step
    assert torch.equal(trainer.model.weight, fresh.model.weight)
    for state, expected in zip(
        trainer.optimizer.state.values(), fresh.optimizer.state.values(), strict=True
    ):
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[name], expected[name]) for name in state)
