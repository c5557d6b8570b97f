"""Train the same network with captured and with plain steps."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from mfwrap import ExponentialMovingAverage, MFTrainOneStepCell
from support.small_networks import Classifier, labelled_batches

__all__ = ["Training", "numbers", "train", "training"]


class Training(NamedTuple):
    cell: MFTrainOneStepCell
    network: Classifier
    optimizer: Optimizer
    schedule: Any


def fused_adamw(parameters: Any) -> Optimizer:
    return torch.optim.AdamW(parameters, lr=2.0**-5, fused=True)


def halving(optimizer: Optimizer) -> Any:
    """Return a schedule whose rates float32 holds exactly."""
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5)


def training(
    *,
    capture: bool,
    network: type[Classifier] = Classifier,
    make_optimizer: Callable[..., Optimizer] = fused_adamw,
    make_schedule: Callable[[Optimizer], Any] | None = halving,
    device: str = "cpu",
    scale_sense: Callable[[], Any] = lambda: 1.0,
    **settings: Any,
) -> Training:
    """Return a cell, captured or not, with what it trains."""
    torch.manual_seed(0)
    trained = network().to(device)
    optimizer = make_optimizer(trained.parameters())
    schedule = None if make_schedule is None else make_schedule(optimizer)
    cell = MFTrainOneStepCell(
        trained,
        optimizer,
        lr_scheduler=schedule,
        ema=ExponentialMovingAverage(trained, 0.9, warmup=True),
        scale_sense=scale_sense(),
        capture=capture,
        **settings,
    )
    return Training(cell, trained, optimizer, schedule)


def train(trained: Training, factors: list[float], *, seed: int = 1) -> list[Tensor]:
    """Do one update for each factor of the loss, and return all results."""
    device = trained.cell.scale_sense.device
    results = []
    batches = labelled_batches(len(factors), seed=seed)
    for (inputs, labels), factor in zip(batches, factors, strict=True):
        scaled = torch.full((), factor, device=device)
        results += [*trained.cell(inputs.to(device), labels.to(device), scaled)]
        report = trained.cell.last_report
        assert report is not None
        results += [report.skipped, report.applied_updates, report.learning_rates]
    return results


def numbers(trained: Training, results: list[Tensor | None]) -> list[float]:
    """Return all results as numbers, with weights, averages, state and rates at the end."""
    trained.cell.flush()
    assert trained.cell.ema is not None
    state = [value for each in trained.optimizer.state.values() for value in each.values()]
    tensors = [x for x in (*results, *trained.network.parameters(), *state) if x is not None]
    tensors += [average for _, average in trained.cell.ema.named_averages()]
    rates = [float(group["lr"]) for group in trained.optimizer.param_groups]
    return [float(x) for tensor in tensors for x in tensor.detach().cpu().ravel()] + rates
