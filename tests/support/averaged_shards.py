"""A program of each rank: train shards, store averages, and build others from them."""

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from mfwrap import ExponentialMovingAverage, MFTrainOneStepCell
from mfwrap.callbacks.average.snapshots import (
    plain_average,
    power_average,
    save_snapshot,
    weighted_sums,
)
from mfwrap.sharded_checkpoint import save_sharded
from support.fsdp.networks import Case, micro_batches_of, new_model, sharded

__all__ = ["LENGTHS", "train_shards"]

LENGTHS = (0.05, 0.10)


def train_shards(rank: int, folder: Path) -> tuple[dict[str, float], dict[str, Tensor]]:
    """Train shards; store snapshots and checkpoints; build averages from each of them.

    Returns:
        Largest relative error of each kind of average, and the whole averages of length 0.07 that
        were kept directly.
    """
    case = Case()
    network = sharded(new_model(per_token=False), case)
    ema = ExponentialMovingAverage(network, sigma_rel=LENGTHS)
    direct = ExponentialMovingAverage(network, sigma_rel=0.07)
    trained = {n: p for n, p in network.named_parameters() if p.requires_grad}
    cell = MFTrainOneStepCell(network, torch.optim.AdamW(trained.values(), lr=1e-3), ema=ema)
    last = []
    for step in range(1, 41):
        [batch] = micro_batches_of(case, step % 4, rank)
        cell(*batch)
        direct.update()
        if step % 4 == 0:
            save_snapshot(ema, folder / "run", step)
            save_sharded(folder / "sharded" / f"step_{step}", cell)
            last.append({n: _whole(parameter) for n, parameter in trained.items()})
    like = dict(direct.named_averages())
    expected = {name: _whole(value) for name, value in like.items()}
    mean = {name: (last[-2][name] + last[-1][name]) / 2 for name in last[-1]}
    cases = {
        "snapshots": (power_average(folder / "run", 0.07), expected),
        "checkpoints": (power_average(folder / "sharded", 0.07), expected),
        "plain": (plain_average(folder / "sharded", 2), mean),
    }
    errors = dict.fromkeys(cases, 0.0)
    for name, (built, wanted) in cases.items():
        for weight, value in weighted_sums(built, like):
            assert isinstance(value, DTensor)
            difference = (_whole(value) - wanted[weight]).norm() / wanted[weight].norm()
            errors[name] = max(errors[name], float(difference))
    return errors, expected


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).double().clone()
