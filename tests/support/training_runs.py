"""Run the same training with plain torch and with the cell, and trace each step."""

import contextlib
import copy
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_, get_total_norm
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import get_ema_multi_avg_fn

from mfwrap import ExponentialMovingAverage, MFTrainOneStepCell

__all__ = ["DECAY", "NUM_STEPS", "OPTIMIZERS", "Trace", "train_plainly", "train_with_cell"]

NUM_STEPS = 30
DECAY = 0.9
_WARMUP_STEPS = 5

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "fused AdamW": lambda weights: AdamW(weights, lr=3e-3, weight_decay=0.1, fused=True),
    "fused SGD": lambda weights: SGD(weights, lr=0.05, momentum=0.9, fused=True),
    "foreach AdamW": lambda weights: AdamW(weights, lr=3e-3, weight_decay=0.1, foreach=True),
    # The default of Adafactor's first eps depends on the weights' dtype, so set both values of eps.
    "Adafactor": lambda weights: Adafactor(weights, lr=1e-2, eps=(1e-7, 1e-3)),
}


class Trace(NamedTuple):
    """The results of a training."""

    losses: Tensor
    """Losses, one per step."""
    norms: Tensor
    """Global norms before clipping, one per step."""
    rates: Tensor
    """Learning rates, one per step."""
    weights: list[Tensor]
    """Weights after the last step."""
    averages: list[Tensor]
    """Averages of the weights after the last step."""


def warmup_and_cosine(step: int) -> float:
    """Return the factor of the learning rate: linear warm-up, then cosine decay to 0."""
    if step < _WARMUP_STEPS:
        return (step + 1) / _WARMUP_STEPS
    progress = (step - _WARMUP_STEPS) / (NUM_STEPS - _WARMUP_STEPS)
    return 0.5 * (1 + math.cos(math.pi * progress))


def train_plainly(
    network: nn.Module,
    make_optimizer: Callable[..., Optimizer],
    batches: Iterable[Any],
    *,
    max_norm: float | None,
    dtype: torch.dtype | None = None,
    autocast: torch.dtype | None = None,
) -> Trace:
    """Train a copy of `network` with a plain loop in torch, in `dtype` if it is given."""
    network = copy.deepcopy(network).to(dtype)
    weights = list(network.parameters())
    optimizer = make_optimizer(weights)
    schedule = LambdaLR(optimizer, warmup_and_cosine)
    averages = [weight.detach().clone() for weight in weights]
    update_averages = get_ema_multi_avg_fn(DECAY)
    steps = []
    for batch in batches:
        with _autocast(autocast):
            loss = _loss_of(network, _converted(batch, dtype))
        loss.backward()
        gradients = [weight.grad for weight in weights]
        norm = get_total_norm(gradients) if max_norm is None else clip_grad_norm_(weights, max_norm)
        steps.append((loss.item(), norm.item(), schedule.get_last_lr()[0]))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        update_averages(averages, [weight.detach() for weight in weights], 1)
    return _trace(steps, weights, averages)


def train_with_cell(
    network: nn.Module,
    make_optimizer: Callable[..., Optimizer],
    batches: Iterable[Any],
    *,
    max_norm: float | None,
    scale: float,
    autocast: torch.dtype | None = None,
) -> Trace:
    """Train a copy of `network` with the cell; a norm is NaN if the cell reports no norm."""
    network = copy.deepcopy(network)
    optimizer = make_optimizer(network.parameters())
    ema = ExponentialMovingAverage(network, decay=DECAY)
    cell = MFTrainOneStepCell(
        network,
        optimizer,
        use_clip_grad=max_norm is not None,
        max_grad_norm=1.0 if max_norm is None else max_norm,
        scale_sense=scale,
        lr_scheduler=LambdaLR(optimizer, warmup_and_cosine),
        ema=ema,
    )
    steps = []
    for batch in batches:
        with _autocast(autocast):
            output = cell(**batch) if isinstance(batch, dict) else cell(*batch)
        norm = math.nan if output.global_norm is None else output.global_norm.item()
        steps.append((output.loss.item(), norm, output.learning_rate.item()))
    averages = [average for _, average in ema.named_averages()]
    return _trace(steps, list(network.parameters()), averages)


def _autocast(dtype: torch.dtype | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if dtype is None else torch.autocast("cpu", dtype=dtype)


def _loss_of(network: nn.Module, batch: Any) -> Tensor:
    return network(**batch).loss if isinstance(batch, dict) else network(*batch)


def _converted(batch: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or isinstance(batch, dict):
        return batch
    return tuple(value.to(dtype) if value.is_floating_point() else value for value in batch)


def _trace(
    steps: Sequence[tuple[float, float, float]], weights: list[Tensor], averages: list[Tensor]
) -> Trace:
    losses, norms, rates = torch.tensor(steps, dtype=torch.float64).unbind(1)
    return Trace(losses, norms, rates.float(), [weight.detach() for weight in weights], averages)
