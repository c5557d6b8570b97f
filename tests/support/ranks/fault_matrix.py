"""Two ranks that train with all monitors; a fault strikes one or both ranks at a chosen step."""

import json
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from mfwrap import ExponentialMovingAverage, StepConfig
from mfwrap.callbacks import CheckpointMonitor, MFLossMonitor, TrainingStateMonitor
from mfwrap.trainer import MFTrainer
from support.ranks.processes import run_ranks

__all__ = ["FAULTS", "MOMENTS", "NUM_UPDATES", "Outcome", "train_with_fault"]

NUM_UPDATES = 8
MOMENTS = {"logged": 3, "saved": 4, "plain": 5, "evaluated": 7}
"""Number of the update that a fault strikes, by what the Trainer does after that update."""

FAULTS = ("overflow", "spike", "NaN loss", "checked NaN loss", "exception", "SIGTERM", "kill")
"""What strikes a rank. The monitor raises an error after a checked NaN loss, on this rank only."""


@dataclass(frozen=True)
class Outcome:
    """How the process of one rank ended."""

    status: int | None
    """Exit status; ``None`` if the process hung."""

    error: str = ""
    """Class and message of the error that ended the training."""

    notes: str = ""
    """Notes of the error."""

    step: int = 0
    """Last step of the training."""

    weights: Sequence[float] = ()
    """Weights after the training."""


class _Faulty(nn.Module):
    """A regression whose forward has a fault in one update.

    Args:
        fault: Fault on this rank, one of `FAULTS`; ``""`` for none.
        update: Number of the update with the fault.
    """

    def __init__(self, fault: str, update: int) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)
        self.fault, self.update, self.count = fault, update, 0

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the loss."""
        loss = (self.layer(inputs).squeeze(-1) - labels).square().mean()
        self.count += self.training
        if self.training and self.count == self.update:
            loss = self._struck(loss)
        return {"loss": loss}

    def _struck(self, loss: Tensor) -> Tensor:
        if self.fault == "exception":
            msg = "the batch is damaged"
            raise ValueError(msg)
        if self.fault in ("SIGTERM", "kill"):
            number = signal.SIGTERM if self.fault == "SIGTERM" else signal.SIGKILL
            os.kill(os.getpid(), number)
        if self.fault.endswith("NaN loss"):
            return loss + torch.full((), float("nan"))
        return loss * {"overflow": float("inf"), "spike": 1e6}.get(self.fault, 1.0)


def _rows(seed: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(8 * NUM_UPDATES, 4, generator=generator)
    return [{"inputs": row, "labels": row.sum()} for row in inputs]


def _train(rank: int, folder: Path, fault: str, update: int, struck: list[int]) -> None:
    torch.manual_seed(0)
    trainer = MFTrainer(
        _Faulty(fault if rank in struck else "", update),
        TrainingArguments(
            str(folder / "run"),
            max_steps=NUM_UPDATES,
            per_device_train_batch_size=4,
            logging_steps=MOMENTS["logged"],
            save_strategy="steps",
            save_steps=MOMENTS["saved"],
            eval_strategy="steps",
            eval_steps=MOMENTS["evaluated"],
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=_rows(0),
        eval_dataset=_rows(1),
        callbacks=[
            TrainingStateMonitor(check_for_nan_in_loss_and_grad=fault == "checked NaN loss"),
            MFLossMonitor(),
            CheckpointMonitor(save_checkpoint_steps=4),
        ],
        step=StepConfig(local_norm=True),
        ema=lambda model: ExponentialMovingAverage(model, 0.9),
        scale_sense=1024.0,
    )
    result: dict[str, Any] = {}
    try:
        trainer.train()
    except Exception as error:  # noqa: BLE001  (the test reads it)
        result = {"error": f"{type(error).__name__}: {error}"}
        result["notes"] = " ".join(getattr(error, "__notes__", []))
    finally:
        result["step"] = trainer.state.global_step
        result["weights"] = [
            each.item() for p in trainer.model.parameters() for each in p.flatten()
        ]
        (folder / f"rank{rank}.json").write_text(json.dumps(result), encoding="utf-8")


def train_with_fault(folder: Path, fault: str, moment: str, struck: list[int]) -> list[Outcome]:
    """Train on two ranks in processes of their own; return how each of them ended.

    Args:
        folder: Empty folder.
        fault: One of `FAULTS`.
        moment: One of `MOMENTS`.
        struck: Ranks that the fault strikes.
    """
    statuses = run_ranks(folder, _train, fault, MOMENTS[moment], struck)
    outcomes = []
    for rank, status in enumerate(statuses):
        path = folder / f"rank{rank}.json"
        result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        outcomes.append(Outcome(status, **result))
    return outcomes
