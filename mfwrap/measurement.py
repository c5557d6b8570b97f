"""What one read of the gradients tells of an update."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mfwrap.gradients import NormGroups, sum_of_squares
from mfwrap.losses import Normalizer

__all__ = ["Measurement", "measure"]


class Measurement(NamedTuple):
    """One read of the gradients; tensors on the training device."""

    overflow: Tensor
    """Shape ``()``, bool: the gradients are not finite, or the loss scale is none."""

    divisor: Tensor | None
    """Shape ``()``, float32: what makes the gradients unscaled, a copy; ``None`` if nothing has
    to."""

    global_norm: Tensor
    """Shape ``()``, float32: L2 norm of all unscaled gradients."""

    local_norm: Tensor
    """Shape ``(G,)``, float32: L2 norm by group of the unscaled gradients."""

    has_targets: Tensor | None
    """Shape ``()``, bool: whether there is anything to learn from; ``None`` for yes."""


def measure(
    gradients: Sequence[Tensor | None],
    groups: NormGroups,
    loss_scale: Tensor,
    normalizer: Normalizer | None = None,
) -> Measurement:
    """Read the gradients once. Does not wait for the device.

    Args:
        gradients: Scaled, one for each parameter of `groups`; ``None`` counts as zeros.
        groups: Groups of local norms.
        loss_scale: Shape ``()``, float32, on the training device.
        normalizer: What the gradients are divided by beside the loss scale; ``None`` for 1.

    Returns:
        Norms of the unscaled gradients, and whether they are finite.
    """
    squares = sum_of_squares(gradients, loss_scale.device)
    square = squares.sum()
    if normalizer is None:
        divisor = local_divisor = loss_scale.clone()
    else:
        divisor = loss_scale * _nonzero(normalizer.reduced)
        local_divisor = loss_scale * _nonzero(normalizer.local)
    return Measurement(
        # A scale of 0 or below may have been set without anyone reading it.
        overflow=~(torch.isfinite(square) & (loss_scale > 0)),
        divisor=divisor,
        global_norm=square.sqrt() / divisor,
        local_norm=groups.sums(squares).sqrt() / local_divisor,
        has_targets=None if normalizer is None else normalizer.reduced != 0,
    )


def _nonzero(divisor: Tensor) -> Tensor:
    # A batch without targets has gradients of zero; dividing them by zero would report nan.
    return torch.where(divisor == 0, 1.0, divisor)
