"""Checks of what an average of weights is given."""

import numbers

import torch
from torch import Tensor

from mfwrap.arguments import described

__all__ = ["check_applied", "check_placement", "checked_decay"]


def checked_decay(decay: float) -> float:
    """Return `decay` as a float, or raise unless it is a number in [0, 1)."""
    if isinstance(decay, bool) or not isinstance(decay, numbers.Real):
        msg = f"`decay` must be a number, got {described(decay)}"
        raise TypeError(msg)
    if not 0 <= decay < 1:
        msg = f"`decay` must be in [0, 1), got {decay}"
        raise ValueError(msg)
    return float(decay)


def check_placement(device: object, dtype: object) -> None:
    """Raise unless averages can be kept on `device` and in `dtype`; ``None`` leaves it open."""
    if not (device is None or isinstance(device, (str, torch.device))):
        msg = f"`device` must be a device, its name or None, got {described(device)}"
        raise TypeError(msg)
    if not (dtype is None or isinstance(dtype, torch.dtype)):
        msg = f"`dtype` must be a torch.dtype or None, got {described(dtype)}"
        raise TypeError(msg)
    if dtype is not None and not dtype.is_floating_point:
        msg = f"`dtype` must be a floating-point dtype, got {dtype}"
        raise ValueError(msg)


def check_applied(applied: object) -> None:
    """Raise unless `applied` is ``None`` or a bool tensor of shape ``()``, which is not read."""
    if applied is None:
        return
    if not isinstance(applied, Tensor) or applied.dtype != torch.bool:
        msg = f"`applied` must be a bool tensor or None, got {described(applied)}"
        raise TypeError(msg)
    if applied.dim() != 0:
        msg = f"`applied` must have shape (), got {tuple(applied.shape)}"
        raise ValueError(msg)
