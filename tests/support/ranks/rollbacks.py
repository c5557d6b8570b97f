"""Trainings on several ranks that go back to a checkpoint after bad rows."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import TrainingArguments

from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.trainer import MFTrainer, Rollback
from support.attached_runs import new_accelerator

__all__ = ["NUM_ROWS", "going_back"]

NUM_ROWS = 48


class _Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, column: str, bad: int) -> None:
        self._column, self._bad = column, bad

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = {"inputs": torch.arange(3.0).add(index).sin(), "labels": torch.zeros(())}
        return row | ({self._column: row[self._column] * torch.nan} if index == self._bad else {})


class _Shifted(nn.Module):
    """A network whose labels change the loss, but not the gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0).cos())

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        return {"loss": (inputs @ self.weight - 1).square().mean() + labels.mean()}


def going_back(
    rank: int,
    folder: str,
    column: str,
    bad: int,
    skip_rows: str | None = None,
    settings: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Train for 14 steps with a bad row.

    Args:
        rank: This rank.
        folder: Run folder.
        column: Column that is NaN in the bad row: with ``"inputs"`` the gradients are not finite,
            on all ranks; with ``"labels"`` only the loss, on one rank.
        bad: Index of the bad row.
        skip_rows: Rows to leave out; ``None`` goes back after the bad row.
        settings: Further settings of the rollback.

    Returns:
        The weights, the number of steps, the rollbacks of the run, and the logged learning rates.
    """
    del rank
    new_accelerator()
    kinds = ("loss_not_finite", "gradient_not_finite")
    trainer = MFTrainer(
        _Shifted(),
        TrainingArguments(
            folder,
            per_device_train_batch_size=2,
            max_steps=14,
            save_steps=2,
            logging_steps=1,
            learning_rate=1e-2,
            report_to="none",
            disable_tqdm=True,
            log_level="error",
            use_cpu=True,
            remove_unused_columns=False,
            dataloader_pin_memory=False,
            ddp_find_unused_parameters=False,
        ),
        train_dataset=_Rows(column, bad),
        callbacks=[TrainingStateMonitor(check_for_nan_in_loss_and_grad=False)],
        rollback=None if skip_rows else Rollback(kinds=kinds, **settings or {}),
        skip_rows=skip_rows,
    )
    trainer.train()
    file = Path(folder) / "rollbacks.json"
    return {
        "weight": trainer.model.weight.detach().clone(),
        "step": trainer.state.global_step,
        "rates": [each["learning_rate"] for each in trainer.state.log_history[:14]],
        "rollbacks": json.loads(file.read_text())["rollbacks"] if file.exists() else [],
    }
