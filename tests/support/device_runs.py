"""Trainings of the same small networks on a CPU and on a GPU."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback

from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage, StepConfig
from mfwrap.trainer import MFTrainer
from support.small_networks import Classifier, labelled_batches
from support.trainer_runs import new_trainer

__all__ = ["LossNetwork", "Rows", "everything", "small_trainer", "stacked"]


class LossNetwork(Classifier):
    """A `Classifier` with dropout that returns its loss as the Trainer expects it.

    Its forward reads nothing on the host, unlike those of transformers' models.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers.insert(2, nn.Dropout(0.25))

    def forward(self, inputs: Tensor, labels: Tensor, factors: Tensor) -> dict[str, Tensor]:
        """Return the loss: the mean cross-entropy, times the mean of `factors`."""
        return {"loss": super().forward(inputs, labels, factors.mean())}


class Rows(Dataset):
    """Rows for a `LossNetwork`.

    Args:
        number: Number of rows.
        bad: Rows whose factor is NaN.
    """

    def __init__(self, number: int = 64, bad: Sequence[int] = ()) -> None:
        [(self._inputs, self._labels)] = labelled_batches(1, size=number)
        self._factors = torch.ones(number)
        self._factors[list(bad)] = float("nan")

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {
            "inputs": self._inputs[index],
            "labels": self._labels[index],
            "factors": self._factors[index],
        }


def stacked(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return rows as one batch."""
    return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def everything(**settings: Any) -> dict[str, Any]:
    """Return keywords of `MFTrainer` with all features of the step, without clipping."""
    return {
        "step": StepConfig(local_norm=True, local_norm_groups="layer", **settings),
        "ema": lambda model: ExponentialMovingAverage(model, 0.9, warmup=True),
        "scale_sense": DynamicLossScaleUpdateCell(2.0**10, 2, 3),
    }


def small_trainer(
    folder: Path,
    device: str,
    *,
    kind: type[Trainer] = MFTrainer,
    model: Callable[[], nn.Module] = LossNetwork,
    data: Dataset | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    extras: dict[str, Any] | None = None,
    **arguments: Any,
) -> Any:
    """Return a silent trainer of a small network on a device, with batches that need no wait.

    Args:
        folder: Folder for checkpoints.
        device: ``"cpu"`` or ``"cuda"``.
        kind: Class of the trainer.
        model: Makes the network.
        data: Training data; by default 64 `Rows`.
        callbacks: Callbacks of the user.
        extras: Further keywords of the trainer.
        arguments: Keywords of ``TrainingArguments``.
    """
    torch.manual_seed(0)
    defaults: dict[str, Any] = {
        "gradient_accumulation_steps": 2,
        "optim": "adamw_torch_fused",
        "use_cpu": device == "cpu",
        "dataloader_pin_memory": device != "cpu",
        "accelerator_config": {"non_blocking": device != "cpu"},
        "logging_strategy": "no",
    }
    trainer = new_trainer(
        kind,
        folder,
        model=model(),
        data=Rows() if data is None else data,
        callbacks=callbacks,
        extras={"data_collator": stacked} | (extras or {}),
        **defaults | arguments,
    )
    assert {weight.device.type for weight in trainer.model.parameters()} == {device}
    return trainer
