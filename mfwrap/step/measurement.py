"""What one read of the gradients tells of an update."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mfwrap.step.clipping import NormGroups, sum_of_squares
from mfwrap.step.local_norms import LocalSquares
from mfwrap.step.losses import Normalizer
from mfwrap.step.ranks import RankAgreement
from mfwrap.tensors.sharded_norms import SquareReduction
from mfwrap.tensors.shards import local_tensors

__all__ = ["Measurement", "measure"]


class Measurement(NamedTuple):
    """One read of the gradients; tensors on the training device."""

    overflow: Tensor
    """Shape ``()``, bool: the gradients are not finite, scaled or unscaled, or what they are
    divided by is no positive, finite number."""

    divisor: Tensor | None
    """Shape ``()``, float32: what makes the gradients unscaled, a copy; ``None`` if nothing has
    to."""

    global_norm: Tensor
    """Shape ``()``, float32: L2 norm of all unscaled gradients, the same on all ranks."""

    local_norm: Tensor
    """Shape ``(G,)``, float32: L2 norm by group of this rank's own unscaled gradients."""

    groups: NormGroups
    """The ``G`` groups."""

    has_targets: Tensor | None
    """Shape ``()``, bool: whether there is anything to learn from; ``None`` for yes."""


def measure(
    gradients: Sequence[Tensor | None],
    groups: NormGroups,
    loss_scale: Tensor,
    normalizer: Normalizer | None = None,
    *,
    local_squares: LocalSquares | None = None,
    agreement: RankAgreement | None = None,
    reduction: SquareReduction | None = None,
) -> Measurement:
    """Read the gradients once. Does not wait for the device.

    Args:
        gradients: Scaled, one for each parameter of `groups`; ``None`` counts as zeros.
        groups: Groups of local norms.
        loss_scale: Shape ``()``, float32, on the training device.
        normalizer: What the gradients are divided by beside the loss scale; ``None`` for 1.
        local_squares: This rank's own gradients; ``None`` if those that are read are its own.
        agreement: With ranks whose gradients differ after their reduction; ``None`` for none.
        reduction: With ranks that share the gradients, of all parameters; ``None`` for none. It
            agrees, too, and takes a partial `normalizer` along.

    Returns:
        Norms of the unscaled gradients, and whether they are finite.
    """
    squares = sum_of_squares(local_tensors(gradients), loss_scale.device)
    own_squares = None if local_squares is None else local_squares.squares(squares)
    if reduction is not None:
        squares, total = reduction(squares, None if normalizer is None else normalizer.reduced)
        if normalizer is not None and normalizer.is_partial:
            normalizer = Normalizer(total, normalizer.local)
    square = squares.sum() if agreement is None else agreement.mean(squares.sum())
    if normalizer is None:
        divisor = local_divisor = loss_scale.clone()
    else:
        divisor = loss_scale * _nonzero(normalizer.reduced)
        local_divisor = loss_scale * _nonzero(normalizer.local)
    if own_squares is None:
        own_squares = squares
    global_norm = square.sqrt() / divisor
    return Measurement(
        # A scale of 0 or below may have been set, and a denominator that is nan or infinite
        # returned, without anyone reading it.
        overflow=~(torch.isfinite(global_norm) & torch.isfinite(divisor) & (divisor > 0)),
        divisor=divisor,
        global_norm=global_norm,
        local_norm=groups.sums(own_squares).sqrt() / local_divisor,
        groups=groups,
        has_targets=None if normalizer is None else normalizer.reduced != 0,
    )


def _nonzero(divisor: Tensor) -> Tensor:
    # A batch without targets has gradients of zero; dividing them by zero would report nan.
    return torch.where(divisor == 0, 1.0, divisor)
