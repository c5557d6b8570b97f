"""Program that two ranks run to train with DistributedDataParallel."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW

from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage, MFTrainOneStepCell
from support.small_networks import IGNORED, Classifier, TokenClassifier, labelled_batches

__all__ = ["NUM_RANKS", "NUM_STEPS", "micro_batches", "run_rank", "token_network"]

NUM_RANKS = 2
NUM_STEPS = 3
NAN = float("nan")


def token_network() -> nn.Module:
    """Return a network with fixed initial weights, which all ranks and the reference share."""
    torch.manual_seed(0)
    return TokenClassifier()


def micro_batches(step: int, rank: int) -> list[tuple[Tensor, Tensor]]:
    """Return two micro-batches with unequal numbers of targets.

    Rank 1 has no targets in the last step.
    """
    [(inputs, labels)] = labelled_batches(1, size=8, seed=10 * step + rank)
    labels[: 1 + 2 * rank] = IGNORED
    labels[5] = IGNORED
    if step == NUM_STEPS - 1 and rank == 1:
        labels[:] = IGNORED
    return list(zip(inputs.split([3, 5]), labels.split([3, 5]), strict=True))


def run_rank(rank: int, folder: str) -> None:
    """Run all trainings as one of the ranks, and save their results in `folder`."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    results = {
        "per token": _train_per_token(rank, lambda network: network),
        "per token, compiled": _train_per_token(
            rank, functools.partial(torch.compile, backend="eager")
        ),
        "per token, wrapped": _train_per_token(rank, Wrapped),
        "mean": _train_by_mean(rank),
        "nan": _train_with_a_nan(rank),
    }
    torch.save(results, Path(folder) / f"rank{rank}.pt")
    distributed.destroy_process_group()


def _weights(network: nn.Module) -> list[Tensor]:
    return [weight.detach().clone() for weight in network.parameters()]


class Wrapped(nn.Module):
    """A module that contains a DistributedDataParallel module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the outputs of the inner module."""
        result: tuple[Tensor, Tensor] = self.inner(*inputs)
        return result


def _train_per_token(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    network = wrap(DistributedDataParallel(token_network()))
    cell = MFTrainOneStepCell(
        network,
        SGD(network.parameters(), lr=0.1, momentum=0.9, fused=True),
        use_clip_grad=True,
        max_grad_norm=0.5,
        scale_sense=2.0**16,
        calculate_per_token_loss=True,
    )
    outputs = [cell.step(micro_batches(step, rank)) for step in range(NUM_STEPS)]
    return {
        "weights": _weights(network),
        "losses": torch.stack([output.loss for output in outputs]),
        "norms": torch.stack([output.global_norm for output in outputs]),
    }


def _train_by_mean(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    network = DistributedDataParallel(Classifier())
    cell = MFTrainOneStepCell(
        network,
        SGD(network.parameters(), lr=0.1, fused=True),
        scale_sense=2.0**16,
        gradient_accumulation_steps=2,
    )
    for inputs, labels in labelled_batches(NUM_STEPS, size=8):
        cell(inputs.chunk(NUM_RANKS)[rank], labels.chunk(NUM_RANKS)[rank])
    return {"weights": _weights(network)}


def _train_with_a_nan(rank: int) -> dict[str, Any]:
    torch.manual_seed(0)
    network = DistributedDataParallel(Classifier())
    optimizer = AdamW(network.parameters(), lr=1e-2, fused=True)
    ema = ExponentialMovingAverage(network.module, decay=0.9)
    cell = MFTrainOneStepCell(
        network, optimizer, scale_sense=DynamicLossScaleUpdateCell(1024.0, 2, 100), ema=ema
    )
    before, after, reports = [], [], []
    for step, (inputs, labels) in enumerate(labelled_batches(NUM_STEPS, seed=5 + rank)):
        before.append(_weights(network))
        cell(inputs, labels, NAN if (rank, step) == (1, 1) else 1.0)
        after.append(_weights(network))
        reports.append(cell.last_report)
    return {
        "before": before,
        "after": after,
        "overflow": [report.output.overflow.item() for report in reports],
        "skipped": [report.skipped.item() for report in reports],
        "scales": [report.output.loss_scale.item() for report in reports],
        "averages": [average.clone() for _, average in ema.named_averages()],
        "count": optimizer.state[network.module.layers[0].weight]["step"].item(),
    }
