"""One decision for ranks whose gradients differ after the reduction.

Where DistributedDataParallel or ``fully_shard`` reduces all gradients, every rank has the same bits
and decides the same. A network may also be distributed in parts only, or have parameters that
DistributedDataParallel ignores. Then one rank might skip an update that another one applies. Such
ranks take the mean of their sums of squares and decide by that.
"""

from collections.abc import Sequence
from typing import final

from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from mfwrap.collectives import add_over_ranks
from mfwrap.tensors.shards import is_distributed


@final
class RankAgreement:
    """One sum of squares for ranks that have different gradients.

    Skips, clipping and the loss scale follow from it, so they are the same on all ranks.

    Args:
        group: Ranks that agree.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def mean(self, square: Tensor) -> Tensor:
        """Return the mean over ranks; not finite if the number is not finite on some rank.

        Takes one message. Gradients that are equal on all ranks count once, as they should.

        Args:
            square: This rank's sum of squares, shape ``()``, float32.
        """
        # In float64 the mean of equal float32 numbers is that number exactly, and no sum overflows.
        mean = square.double() / self._group.size()
        add_over_ranks(mean, self._group)
        return mean.float()


def agreement_of(
    parts: Sequence[DistributedDataParallel], parameters: Sequence[nn.Parameter]
) -> RankAgreement | None:
    """Return the agreement that ranks need.

    Args:
        parts: All DistributedDataParallel parts of the network.
        parameters: Trained parameters.

    Returns:
        ``None`` if all gradients are reduced, or there is only one rank.
    """
    if not parts or parts[0].process_group.size() == 1:
        return None
    if any(is_distributed(parameter) for parameter in parameters):
        # `SquareReduction` sums over the ranks that hold shards, and averages the rest with it.
        return None
    reduced = {id(parameter) for part in parts for parameter in _reduced_by(part)}
    if all(id(p) in reduced for p in parameters if p.requires_grad):
        return None
    return RankAgreement(parts[0].process_group)


def _reduced_by(part: DistributedDataParallel) -> list[nn.Parameter]:
    ignored = part.parameters_to_ignore
    return [
        parameter
        for name, parameter in part.module.named_parameters()
        if name not in ignored and parameter.requires_grad
    ]
