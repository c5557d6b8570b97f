"""How ranks whose gradients may differ come to one decision."""

from collections.abc import Sequence
from typing import final

from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from mfwrap.collectives import add_over_ranks
from mfwrap.tensors.shards import is_distributed

__all__ = ["RankAgreement", "agreement_of"]


@final
class RankAgreement:
    """One sum of squares for ranks of which each has gradients of its own.

    Skips, clipping and loss scale follow from it, so they are the same on all ranks.

    Args:
        group: The ranks.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def mean(self, square: Tensor) -> Tensor:
        """Return the mean over ranks, with one message; not finite if it is not on any rank.

        What is the same on all ranks counts once.

        Args:
            square: Shape ``()``, float32.
        """
        # In double precision the mean of equal numbers is that number, and no sum overflows.
        mean = square.double() / self._group.size()
        add_over_ranks(mean, self._group)
        return mean.float()


def agreement_of(
    parts: Sequence[DistributedDataParallel], parameters: Sequence[nn.Parameter]
) -> RankAgreement | None:
    """Return how ranks agree if they have to.

    Reduced gradients are the same bits on all ranks, and so is all that is decided by them.

    Args:
        parts: All DistributedDataParallel parts of the network.
        parameters: The trained ones.

    Returns:
        ``None`` if all of their gradients are reduced, or there are no ranks to agree with.
    """
    if not parts or parts[0].process_group.size() == 1:
        return None
    if any(is_distributed(parameter) for parameter in parameters):
        # The sum over shards is the same on all ranks, and all else is averaged along.
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
