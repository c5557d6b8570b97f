"""Trainings with `MFTrainer` on two ranks whose settings or data differ."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers import TrainerCallback, TrainingArguments

from mfwrap.callbacks import MFLossMonitor
from mfwrap.trainer import MFTrainer
from support.attached_runs import new_accelerator
from support.ranks.processes import run_ranks

__all__ = ["APART", "EPOCHS_APART", "ROWS", "Line", "run_apart", "run_dry"]

ROWS = [{"inputs": row, "labels": row.sum()} for row in torch.randn(40, 2)]


class Line(nn.Module):
    """A linear regression.

    Args:
        width: Number of inputs.
    """

    def __init__(self, width: int = 2) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1)

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": (self.layer(inputs).squeeze(-1) - labels).square().mean()}


class _OwnLoader(MFTrainer):
    """A trainer whose data loader is not shared out by accelerate."""

    def get_train_dataloader(self) -> Any:
        return DataLoader(self.train_dataset, batch_size=4)


def _apart(rank: int, name: str) -> dict[str, Any]:
    is_uneven = name == "length of the data" or name in EPOCHS_APART
    rows = ROWS[: 40 - 8 * rank] if is_uneven else ROWS
    width = 2 + rank if name == "shape" else 2
    callbacks: list[TrainerCallback] = []
    if rank == 0:
        # Callbacks of others may differ, such as a progress bar on one rank.
        callbacks = [MFLossMonitor() if name == "callbacks" else TrainerCallback()]
    return {"model": Line(width), "train_dataset": rows, "callbacks": callbacks}


APART = {
    "shape": ({}, "layer.weight is float32[1, 2] on rank 0 but float32[1, 3] on rank 1"),
    "length of the data": ({}, "number of updates is 10 on rank 0 but 8 on rank 1"),
    "callbacks": (
        {},
        "callbacks: list of mfwrap's callbacks is ['MFLossMonitor'] on rank 0 but [] on rank 1",
    ),
    "argument": (
        {"save_steps": [3, 4]},
        "training arguments: save_steps is 3 on rank 0 but 4 on rank 1",
    ),
}
"""By name: arguments of each rank, and a part of the expected message."""

EPOCHS_APART = {
    "checkpoints at the ends of epochs": {"max_steps": 5, "save_strategy": "epoch"},
    "a length in epochs": {"max_steps": 0},
}
"""By name: arguments with which the ranks need epochs of the same length."""


def _arguments(folder: str, **settings: Any) -> TrainingArguments:
    return TrainingArguments(
        folder,
        num_train_epochs=1,
        use_cpu=True,
        report_to="none",
        disable_tqdm=True,
        **settings,
    )


def run_apart(rank: int, folder: str, name: str) -> str:
    """Train with settings that differ between the ranks; return the message of the error."""
    new_accelerator()
    apart = APART[name][0] if name in APART else {}
    settings = {key: values[rank] for key, values in apart.items()} | EPOCHS_APART.get(name, {})
    trainer = _OwnLoader(args=_arguments(folder, **settings), **_apart(rank, name))
    with pytest.raises(RuntimeError) as caught:
        trainer.train()
    return str(caught.value)


class _Stream(IterableDataset):  # type: ignore[type-arg]  # (test data)
    def __init__(self, num_rows: int) -> None:
        self._num_rows = num_rows

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(ROWS[: self._num_rows])


class _OneEpoch(TrainerCallback):
    def on_epoch_end(self, _args: Any, _state: Any, control: Any, **_: Any) -> None:
        control.should_training_stop = True


def _run_dry(rank: int, folder: Path) -> None:
    trainer = _OwnLoader(
        Line(),
        _arguments(str(folder), max_steps=9, save_strategy="no"),
        train_dataset=_Stream(24 if rank == 0 else 20),
        callbacks=[_OneEpoch()],
    )
    try:
        trainer.train()
    except RuntimeError as error:
        text = " ".join([str(error), *getattr(error, "__notes__", [])])
        (folder / f"rank{rank}.txt").write_text(text, encoding="utf-8")


def run_dry(folder: Path) -> list[str]:
    """Train on a stream that has 6 batches on rank 0 and 5 on rank 1.

    Returns:
        The message and the notes of each rank's error.
    """
    run_ranks(folder, _run_dry)
    return [(folder / f"rank{rank}.txt").read_text(encoding="utf-8") for rank in range(2)]
