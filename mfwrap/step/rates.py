"""Read and change the learning rates of an optimizer."""

import contextlib
import logging
import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from mfwrap.tensors.shards import on_device

_logger = logging.getLogger("mfwrap")


def learning_rates(
    optimizer: Optimizer, device: torch.device, *, may_be_bad: bool = False
) -> Tensor:
    """Return the present learning rates of all groups.

    Args:
        optimizer: Optimizer without accelerate's wrapper.
        device: Device of the result.
        may_be_bad: Whether to log a non-finite number, and return it, instead of raising.

    Returns:
        Copy of shape ``(number of groups,)``, float32, on `device`. NaN for a group without a rate
        (transformers' Adafactor computes its own by default). Does not synchronize with the device.

    Raises:
        ValueError: If a rate is a number and non-finite, unless `may_be_bad`. A rate that is a
            tensor is not read; see `has_bad_rate`.
    """
    fault = bad_rate(optimizer)
    if fault is not None:
        if not may_be_bad:
            raise ValueError(fault)
        _logger.warning("all stages of the pipeline skip an update: %s", fault)
    rates = [math.nan if (lr := g.get("lr")) is None else lr for g in optimizer.param_groups]
    if all(isinstance(rate, float) for rate in rates) and len(set(rates)) == 1:
        return torch.full((len(rates),), rates[0], dtype=torch.float32, device=device)
    return torch.stack([_rate(rate, device) for rate in rates])


@contextlib.contextmanager
def lowered_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Within the block, multiply the learning rates of all groups by a factor.

    Do pending steps of schedules before: they compute new rates from those of the groups.

    Args:
        optimizer: Optimizer without accelerate's wrapper.
        factor: Factor of the rates; 1 changes nothing. A group without a rate stays as it is.
    """
    if factor == 1:
        yield
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate * factor  # a new tensor, if the rate is one
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate


def group_names(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the entry ``name`` of each parameter group; nothing unless each group has a name."""
    names = [group.get("name") for group in optimizer.param_groups]
    return () if None in names else tuple(map(str, names))


def has_bad_rate(optimizer: Optimizer, device: torch.device) -> Tensor | None:
    """Return whether a learning rate is non-finite, without reading a rate that is a tensor.

    Returns:
        Shape ``()``, bool, on `device`; ``None`` if all rates are finite numbers.
    """
    if bad_rate(optimizer) is not None:
        return torch.ones((), dtype=torch.bool, device=device)
    rates = [rate for g in optimizer.param_groups if isinstance(rate := g.get("lr"), Tensor)]
    if not rates:
        return None
    return ~torch.stack([_rate(rate, device) for rate in rates]).isfinite().all()


def bad_rate(optimizer: Optimizer) -> str | None:
    """Describe the first learning rate that is a non-finite number; ``None`` if there is none."""
    for number, group in enumerate(optimizer.param_groups):
        rate = group.get("lr")
        if rate is not None and not isinstance(rate, Tensor) and not math.isfinite(rate):
            return (
                f"the learning rate of parameter group {number} must be finite, got {rate}; no "
                "weight was changed; check the schedule, and callbacks that set the rate"
            )
    return None


def _rate(rate: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(rate, Tensor):
        return on_device(rate.detach().reshape(()).float(), device)
    return torch.full((), rate, dtype=torch.float32, device=device)
