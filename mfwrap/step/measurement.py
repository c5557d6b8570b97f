"""Read the gradients once: norms, the overflow flag, and what they must be divided by."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from mfwrap.step.float32_gradients import infinite_where_rounding_overflows
from mfwrap.step.forward import Normalizer
from mfwrap.step.local_norms import LocalSquares
from mfwrap.step.ranks import RankAgreement, StageTotals
from mfwrap.tensors.norm_groups import NormGroups
from mfwrap.tensors.norms import NormReader, sums_by_group
from mfwrap.tensors.sharded_norms import SquareReduction
from mfwrap.tensors.shards import local_tensors


class Measurement(NamedTuple):
    """Result of one read of the gradients; tensors on the training device."""

    overflow: Tensor
    """Whether the norm of the scaled or unscaled gradients is non-finite, or their divisor is not a
    finite number > 0; shape ``()``, bool."""

    divisor: Tensor | None
    """Number that the gradients must be divided by, a copy, shape ``()``, float32; ``None`` for
    1."""

    global_norm: Tensor
    """L2 norm of all unscaled gradients, the same on all ranks, shape ``()``, float32."""

    own_squares: Tensor
    """Sum of squares of this rank's own scaled gradient of each parameter, shape ``(N,)``,
    float32."""

    own_divisor: Tensor | None
    """Divisor of this rank's own gradients, a copy, shape ``()``, float32; ``None`` for 1."""

    groups: NormGroups
    """The ``G`` groups of `local_norm`."""

    has_targets: Tensor | None
    """Whether the batch has at least one target, shape ``()``, bool; ``None`` if targets are not
    counted."""

    loss: Tensor | None = None
    """Loss to report, shape ``()``, float32; ``None`` if it was not given."""

    reduction_norms: Tensor | None = None
    """As in `StepReport`, a copy."""

    has_bad_rate: Tensor | None = None
    """Whether a learning rate is non-finite, shape ``()``, bool; ``None`` if it is unknown yet."""

    num_added: int = 1
    """As in `Accumulated`."""

    def local_norm(self) -> Tensor:
        """Return the L2 norm by group of this rank's own unscaled gradients.

        Returns:
            Shape ``(G,)``, float32. The norms are computed by this call: most steps without
            ``StepConfig.local_norm`` need none.
        """
        norms = sums_by_group(self.own_squares, self.groups.members).sqrt()
        return norms if self.own_divisor is None else norms / self.own_divisor


def measure(
    gradients: Sequence[Tensor | None],
    groups: NormGroups,
    loss_scale: Tensor,
    normalizer: Normalizer | None = None,
    *,
    local_squares: LocalSquares | None = None,
    agreement: RankAgreement | None = None,
    reduction: SquareReduction | None = None,
    loss: Tensor | None = None,
    stages: StageTotals | None = None,
    has_bad_rate: Tensor | None = None,
    rounded_for: Sequence[Tensor] | None = None,
    num_added: int = 1,
    norms: NormReader | None = None,
    scale_is_one: bool = False,
) -> Measurement:
    """Compute norms and the overflow flag in one read of the gradients.

    Does not synchronize with the device.

    Args:
        gradients: Scaled gradients, one for each parameter of `groups`; ``None`` counts as zeros.
        groups: Groups of local norms.
        loss_scale: Loss scale, shape ``()``, float32, on the training device.
        normalizer: Divisor of the gradients besides the loss scale; ``None`` if there is none.
        local_squares: Source of the norms of this rank's own gradients; ``None`` if `gradients`
            are this rank's own.
        agreement: Agreement of ranks whose gradients differ after their reduction; ``None`` if
            there are no such ranks.
        reduction: Sum over the ranks that hold shards of the gradients; ``None`` without shards.
            All these ranks get the same sums. A partial `normalizer` is summed in the same message.
        loss: Loss to report, shape ``()``, float32; needed with `stages`.
        stages: Sum over the ranks that hold other stages of a pipeline; ``None`` without a
            pipeline. It also makes `loss`, `normalizer` and `has_bad_rate` known on all these
            ranks.
        has_bad_rate: As in `StageTotals`.
        rounded_for: Parameters of `gradients`, whose dtypes float32 gradients will be rounded to;
            ``None`` if the gradients have the dtypes of their parameters.
        num_added: As in `Accumulated`: such gradients are divided by it before they are rounded.
        norms: Reader that has read the gradients of these parameters before, to save time.
        scale_is_one: Whether the host knows that `loss_scale` is 1.

    Returns:
        Norms of the unscaled gradients, and whether they are finite.
    """
    norms = NormReader(loss_scale.device) if norms is None else norms
    squares = norms.squares(gradients if reduction is None else local_tensors(gradients))
    own_squares = None if local_squares is None else local_squares.squares(squares)
    if rounded_for is not None:
        divisor_before = _divisor_before_rounding(num_added, normalizer)
        squares = infinite_where_rounding_overflows(squares, gradients, rounded_for, divisor_before)
    if reduction is not None:
        squares, total = reduction(squares, None if normalizer is None else normalizer.reduced)
        if normalizer is not None and normalizer.is_partial:
            normalizer = Normalizer(total, normalizer.local)
    square = squares.sum() if agreement is None else agreement.mean(squares.sum())
    if stages is not None and loss is not None:
        square, loss, normalizer, has_bad_rate = stages(square, loss, normalizer, has_bad_rate)
    is_copied = normalizer is None and not scale_is_one
    divisor = own_divisor = loss_scale.clone() if is_copied else None
    if normalizer is not None:
        divisor = loss_scale * _nonzero(normalizer.reduced)
        own_divisor = loss_scale * _nonzero(normalizer.local)
    reduction_norms = None
    if own_squares is None:
        own_squares = squares
    elif agreement is None and stages is None:
        reduction_norms = torch.stack((own_squares.sum(), square)).sqrt()
        if divisor is not None and own_divisor is not None:
            reduction_norms /= torch.stack((own_divisor, divisor))
    global_norm = square.sqrt() if divisor is None else square.sqrt() / divisor
    is_sound = global_norm < math.inf  # False for NaN
    if divisor is not None:
        # Check the divisor here, too, because the host never reads it: a loop may set a scale <= 0,
        # and a network may return a denominator that is nan or infinite.
        is_sound &= (divisor > 0) & (divisor < math.inf)
    return Measurement(
        overflow=~is_sound,
        divisor=divisor,
        global_norm=global_norm,
        own_squares=own_squares,
        own_divisor=own_divisor,
        groups=groups,
        has_targets=None if normalizer is None else normalizer.reduced != 0,
        loss=loss,
        reduction_norms=reduction_norms,
        has_bad_rate=has_bad_rate,
        num_added=num_added,
    )


def _divisor_before_rounding(num_added: int, normalizer: Normalizer | None) -> int | Tensor:
    # An optimizer that is skipped by the host gets gradients that were divided by the whole divisor
    # before they are rounded. Denominators that are fractions make it less than `num_added`.
    if normalizer is None or normalizer.is_partial:
        return num_added
    return normalizer.reduced.clamp(max=num_added)


def _nonzero(divisor: Tensor) -> Tensor:
    # A batch without targets has zero gradients and a zero divisor: 0 / 0 would give a nan norm.
    return torch.where(divisor == 0, 1.0, divisor)
