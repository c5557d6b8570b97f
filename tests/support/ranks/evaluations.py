"""Programs that each rank runs to evaluate with a Trainer."""

import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import EvalPrediction, Trainer, default_data_collator

from mfwrap.trainer import MFTrainer
from support.trainer_runs import new_trainer

__all__ = ["BATCH", "evaluate", "expected_evaluation"]

BATCH = 8


class Network(nn.Module):
    """A layer whose output has one number for each row, and the mean of their squares as loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1)
        nn.init.constant_(self.layer.weight, 0.5)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        outputs = self.layer(x)[:, 0]
        return {"loss": (outputs - labels).square().mean(), "logits": outputs}


def rows(number: int) -> list[dict[str, Tensor]]:
    """Return rows, the last of which have much larger losses."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(number, 4, generator=generator)
    drawn[-number // 8 :, 3] += 10
    return [{"x": row[:3], "labels": row[3]} for row in drawn]


def expected_evaluation(number: int) -> tuple[float, list[float]]:
    """Return the mean loss of all rows, and their outputs, without a Trainer."""
    data, network = rows(number), Network()
    x, labels = (torch.stack([row[name] for row in data]) for name in ("x", "labels"))
    with torch.no_grad():
        outputs = network.layer(x)[:, 0]
    return float((outputs - labels).square().mean()), outputs.tolist()


def evaluate(
    rank: int,
    number: int,
    with_metrics: bool,  # noqa: FBT001  (a pool of ranks passes positional arguments)
    split: bool,  # noqa: FBT001  (as above)
    stock: bool,  # noqa: FBT001  (as above)
) -> dict[str, Any]:
    """Evaluate rows on all ranks.

    Args:
        rank: Number of this rank.
        number: Number of rows.
        with_metrics: Whether outputs and labels are gathered for metrics.
        split: Whether the ranks share a batch, in the place of one batch for each rank.
        stock: Whether to use the stock Trainer.

    Returns:
        The loss, and the outputs and labels that the metrics got.
    """
    del rank
    got: dict[str, list[float]] = {}

    def keep(found: EvalPrediction) -> dict[str, float]:
        got.update(outputs=found.predictions.tolist(), labels=found.label_ids.tolist())
        return {}

    with tempfile.TemporaryDirectory() as folder:
        trainer = new_trainer(
            Trainer if stock else MFTrainer,
            Path(folder),
            model=Network(),
            extras={
                "compute_metrics": keep if with_metrics else None,
                "data_collator": default_data_collator,
            },
            per_device_eval_batch_size=BATCH // 2 if split else BATCH,
            accelerator_config={"split_batches": split},
        )
        found = trainer.evaluate(rows(number))
    return {"loss": found["eval_loss"], **got}
