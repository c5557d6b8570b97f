"""Programs in which ranks train with steps of a user's own, and with the cells."""

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, Adam

from mfwrap import DynamicLossScaleUpdateCell, TrainOneStepCell, TrainOneStepWithLossScaleCell
from support.own_steps import GuidesStep, OverflowCheckedStep
from support.small_networks import Classifier, labelled_batches

__all__ = ["LAYOUTS", "OPTIMIZERS", "train_both", "train_some_weights", "train_through_overflow"]

OPTIMIZERS = {
    "SGD": lambda weights: SGD(weights, lr=0.1, momentum=0.9),
    "Adam": lambda weights: Adam(weights, lr=1e-2, fused=True),
}


def _sharded(network: Classifier) -> nn.Module:
    fully_shard(network.layers[0])
    fully_shard(network)
    return network


LAYOUTS = {"DistributedDataParallel": DistributedDataParallel, "fully_shard": _sharded}
NUM_STEPS = 3


def _share(rank: int, seed: int, *, factor: float = 1.0) -> tuple[Tensor, ...]:
    [(inputs, labels)] = labelled_batches(1, size=8, seed=seed)
    size = 8 // distributed.get_world_size()
    own = slice(rank * size, (rank + 1) * size)
    return inputs[own], labels[own], torch.full((), factor)


def _network() -> Classifier:
    torch.manual_seed(0)
    return Classifier()


def _weights(network: nn.Module) -> list[Tensor]:
    return [
        weight.detach().full_tensor() if hasattr(weight, "full_tensor") else weight.detach().clone()
        for weight in network.parameters()
    ]


def train_both(rank: int) -> dict[str, dict[str, Any]]:
    """Train every layout and optimizer; return losses and weights of each kind of step."""
    results = {}
    for layout, wrap in LAYOUTS.items():
        for name, optimizer in OPTIMIZERS.items():
            for kind in (TrainOneStepCell, GuidesStep):
                network = wrap(_network())
                cell = kind(network, optimizer(network.parameters()), 4.0)
                losses = [cell(*_share(rank, seed)) for seed in range(1, NUM_STEPS + 1)]
                results[f"{layout}, {name}, {kind.__name__}"] = {
                    "losses": torch.stack(losses),
                    "weights": _weights(network),
                    "reducer_flag": cell.reducer_flag,
                }
    return results


def train_through_overflow(rank: int) -> dict[str, Any]:
    """Train with a loss scale and a NaN on rank 1 only; return the results of each kind of step.

    Each layout is trained by the cell, by a step that looks for overflow after the reduction, and
    by one that looks before.
    """
    results = {}
    for layout, wrap in LAYOUTS.items():
        for name, kind in {
            "cell": TrainOneStepWithLossScaleCell,
            "after": OverflowCheckedStep,
            "before": OverflowCheckedStep,
        }.items():
            network = wrap(_network())
            optimizer = SGD(network.parameters(), lr=0.1)
            cell = kind(network, optimizer, DynamicLossScaleUpdateCell(1024.0, 2, 2))
            if isinstance(cell, OverflowCheckedStep):
                cell.checks_before_reduction = name == "before"
            outputs = [
                cell(*_share(rank, seed, factor=torch.nan if (rank, seed) == (1, 2) else 1.0))
                for seed in range(1, NUM_STEPS + 1)
            ]
            results[f"{layout}, {name}"] = {
                "overflows": [bool(output[1]) for output in outputs],
                "scales": [float(output[2]) for output in outputs],
                "weights": _weights(network),
            }
    return results


def train_some_weights(rank: int) -> list[list[Tensor]]:
    """Train the last layer by assigned weights, then by an optimizer of these; return weights."""
    results = []
    for is_assigned in (True, False):
        network = DistributedDataParallel(_network())
        last = list(network.module.layers[2].parameters())
        weights = network.parameters() if is_assigned else last
        cell = GuidesStep(network, SGD(weights, lr=0.1))
        if is_assigned:
            cell.weights = last
        for seed in range(1, NUM_STEPS + 1):
            cell(*_share(rank, seed))
        results.append(_weights(network))
    return results
