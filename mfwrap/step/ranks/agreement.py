"""Make ranks reach the same decision if their gradients differ after the reduction.

`RankAgreement` is for ranks that train the same parameters, `StageTotals` for ranks that train the
stages of one pipeline.

Where DistributedDataParallel or ``fully_shard`` reduces all gradients, every rank has bitwise
identical gradients and makes the same decision. But DistributedDataParallel may wrap only some
modules of a network, or ignore some parameters. Then one rank might skip an update that another
rank applies. Such ranks average their sums of squares, and all decide by this mean.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol, final

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from mfwrap.collectives import add_over_ranks
from mfwrap.step.losses import Normalizer
from mfwrap.tensors.shards import is_distributed


class Totals(NamedTuple):
    """Numbers of an update that all ranks must share; tensors on the training device."""

    square: Tensor
    """Sum of squares of the gradients, shape ``()``, float32."""

    loss: Tensor | None = None
    """Loss of the update, shape ``()``, float32; needed in a pipeline."""

    normalizer: Normalizer | None = None
    """Divisor of the gradients besides the loss scale; ``None`` on all ranks if there is none."""

    has_bad_rate: Tensor | None = None
    """Whether a learning rate is non-finite, shape ``()``, bool; ``None`` if none is, or unless in
    a pipeline."""


class Agreement(Protocol):
    """How the ranks come to the same numbers of an update."""

    is_pipeline: bool
    """Whether the other ranks train other parameters of the same network. Then all ranks measure in
    each update, even one without gradients, and none raises an error alone."""

    has_equal_gradients: bool
    """Whether all ranks have the same gradients after the reduction."""

    def __call__(self, own: Totals) -> Totals:
        """Return the numbers that are the same on all ranks; call it on all of them."""


@final
class RankAgreement:
    """Average a sum of squares over ranks that have different gradients.

    Skips, clipping and the loss scale are computed from the mean, so they are the same on all
    ranks.

    Args:
        group: Process group of the ranks.
    """

    is_pipeline = False
    has_equal_gradients = False

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def __call__(self, own: Totals) -> Totals:
        """Average the sum of squares."""
        return own._replace(square=self._mean(own.square))

    def _mean(self, square: Tensor) -> Tensor:
        """Return the mean over ranks; non-finite if `square` is non-finite on any rank.

        Costs one all-reduce. Gradients that are equal on all ranks count once in the mean.
        """
        # In float64 the mean of equal float32 numbers is that number exactly, and no sum overflows.
        mean = square.double() / self._group.size()
        add_over_ranks(mean, self._group)
        return mean.float()

    def any(self, flag: Tensor) -> Tensor:
        """Return whether `flag` is true on any rank. Does not synchronize with the device.

        Args:
            flag: This rank's flag, shape ``()``, bool.
        """
        return self._mean(flag.float()) > 0


@final
class StageTotals:
    """Sum over the ranks of a pipeline what each rank knows of its own stages, in one all-reduce.

    The loss and the divisors are those of the rank of the last stage, and zeros on all other ranks.

    Args:
        group: Process group of the pipeline's ranks; ``None`` for all ranks.
    """

    is_pipeline = True
    has_equal_gradients = False

    def __init__(self, group: "distributed.ProcessGroup | None") -> None:
        self._group = group

    def __call__(self, own: Totals) -> Totals:
        """Add up the numbers of all stages. Does not synchronize with the device."""
        square, loss, normalizer, has_bad_rate = own
        none = torch.zeros_like(square)
        values = [square, *(none if each is None else each for each in (loss, has_bad_rate))]
        if normalizer is not None:
            values += [normalizer.reduced, normalizer.local]
        # In float64 the sum has no rounding error that float32 could show, whatever its order.
        message = torch.stack([value.double() for value in values])
        add_over_ranks(message, self._group)
        totals = message.float().unbind()
        shared = None if normalizer is None else Normalizer(totals[3], totals[4])
        return Totals(totals[0], totals[1], shared, totals[2] != 0)


def agreement_of(
    parts: Sequence[DistributedDataParallel], parameters: Sequence[nn.Parameter]
) -> Agreement | None:
    """Return how ranks agree that train the same parameters.

    Args:
        parts: All DistributedDataParallel modules of the network.
        parameters: Trained parameters.

    Returns:
        A `RankAgreement` if gradients may differ between ranks after the reduction. ``None`` if all
        gradients are reduced, if there is only one rank, or if a parameter is sharded
        (`SquareReduction` then makes the ranks agree).
    """
    if not parts or parts[0].process_group.size() == 1:
        return None
    if any(is_distributed(parameter) for parameter in parameters):
        # No agreement is needed. `SquareReduction` sums over the ranks that hold shards, and in the
        # same collective it averages the sums of squares of all other parameters.
        return None
    reduced = {id(parameter) for part in parts for parameter in reduced_by(part)}
    if all(id(p) in reduced for p in parameters if p.requires_grad):
        return None
    return RankAgreement(parts[0].process_group)


def reduced_by(part: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients a DistributedDataParallel module reduces."""
    ignored = part.parameters_to_ignore
    return [p for name, p in part.module.named_parameters() if name not in ignored]
