"""Trainings with a bad row whose anomalies name this row, on one rank or several."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.trainer import MFTrainer
from support.attached_runs import new_accelerator

__all__ = ["NUM_ROWS", "Numbered", "NumberedRows", "samples_of", "samples_on_rank"]

NUM_ROWS = 26


class NumberedRows(Dataset[dict[str, Tensor]]):
    """Rows that are alike but for their numbers, and for a bad row, which is not finite.

    Args:
        bad: Index of the bad row.
        with_indices: Whether rows hold an entry ``indices``, which is 1000 more than their number.
    """

    def __init__(self, bad: int, *, with_indices: bool = False) -> None:
        self._bad, self._with_indices = bad, with_indices

    def __len__(self) -> int:
        return NUM_ROWS

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = {
            "number": torch.tensor(index),
            "inputs": torch.full((3,), torch.nan if index == self._bad else 1.0),
            "labels": torch.zeros(()),
        }
        return row | ({"indices": row["number"] + 1000} if self._with_indices else {})


class Numbered(nn.Module):
    """A regression that records the numbers of the rows that it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(3.0).cos())
        self.seen: set[int] = set()

    def forward(
        self, inputs: Tensor, labels: Tensor, number: Tensor, indices: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Return the loss."""
        del indices
        if self.training:
            self.seen.update(number.tolist())
        return {"loss": (inputs @ self.weight - labels).square().mean()}


def samples_of(folder: Path) -> list[dict[str, Any]]:
    """Return the samples that the anomalies of a run name, each with its step."""
    file = folder / "anomalies.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [
        {"step": record["step"], **sample}
        for record in map(json.loads, lines)
        for sample in record.get("samples", ())
    ]


def samples_on_rank(
    rank: int, folder: str, bad: int, settings: dict[str, Any], resume: str | None = None
) -> tuple[list[dict[str, Any]], set[int]]:
    """Train with a bad row; return the samples that are named, and the rows this rank trained on.

    Args:
        rank: This rank.
        folder: Run folder.
        bad: Index of the bad row.
        settings: Keywords of ``TrainingArguments``, and ``skip_rows``.
        resume: Checkpoint to resume from.
    """
    new_accelerator()
    settings = dict(settings)
    skip_rows = settings.pop("skip_rows", None)
    trainer: Trainer = MFTrainer(
        Numbered(),
        TrainingArguments(
            folder,
            report_to="none",
            disable_tqdm=True,
            log_level="error",
            use_cpu=True,
            dataloader_pin_memory=False,
            ddp_find_unused_parameters=False,
            **{"save_strategy": "no"} | settings,
        ),
        train_dataset=NumberedRows(bad),
        callbacks=[TrainingStateMonitor(replay=True, check_for_nan_in_loss_and_grad=False)],
        skip_rows=skip_rows,
    )
    trainer.train(resume_from_checkpoint=resume)
    network: Any = trainer.model
    return (samples_of(Path(folder)) if rank == 0 else []), network.seen
