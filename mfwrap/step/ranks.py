"""Make ranks reach the same decision if their gradients differ after the reduction.

Where DistributedDataParallel or ``fully_shard`` reduces all gradients, every rank has bitwise
identical gradients and makes the same decision. But DistributedDataParallel may wrap only some
modules of a network, or ignore some parameters. Then one rank might skip an update that another
rank applies. Such ranks average their sums of squares, and all decide by this mean.
"""

from collections.abc import Sequence
from typing import final

from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from mfwrap.collectives import add_over_ranks
from mfwrap.tensors.shards import is_distributed


@final
class RankAgreement:
    """Average a sum of squares over ranks that have different gradients.

    Skips, clipping and the loss scale are computed from the mean, so they are the same on all
    ranks.

    Args:
        group: Process group of the ranks.
    """

    def __init__(self, group: distributed.ProcessGroup) -> None:
        self._group = group

    def mean(self, square: Tensor) -> Tensor:
        """Return the mean over ranks; non-finite if `square` is non-finite on any rank.

        Costs one all-reduce. Gradients that are equal on all ranks count once in the mean.

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
    """Return a `RankAgreement` if gradients may differ between ranks after the reduction.

    Args:
        parts: All DistributedDataParallel modules of the network.
        parameters: Trained parameters.

    Returns:
        The agreement; ``None`` if all gradients are reduced, if there is only one rank, or if a
        parameter is sharded (`SquareReduction` then makes the ranks agree).
    """
    if not parts or parts[0].process_group.size() == 1:
        return None
    if any(is_distributed(parameter) for parameter in parameters):
        # No agreement is needed. `SquareReduction` sums over the ranks that hold shards, and in the
        # same collective it averages the sums of squares of all other parameters.
        return None
    reduced = {id(parameter) for part in parts for parameter in _reduced_by(part)}
    if all(id(p) in reduced for p in parameters if p.requires_grad):
        return None
    return RankAgreement(parts[0].process_group)


def _reduced_by(part: DistributedDataParallel) -> list[nn.Parameter]:
    ignored = part.parameters_to_ignore
    return [p for name, p in part.module.named_parameters() if name not in ignored]
