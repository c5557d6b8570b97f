"""Compare this rank with ranks that train without it."""

import hashlib
import logging
import warnings
from collections.abc import Mapping
from typing import final

from torch import distributed, nn

from mfwrap.arguments import callers_stacklevel
from mfwrap.collectives import Announcements

_MOST_NAMED = 2
"""Largest number of parameters that a message names for each rank."""

_logger = logging.getLogger("mfwrap")


@final
class OtherRanks:
    """Find out whether ranks that this rank does not exchange gradients with train something else.

    Ranks that train different parameters are the stages of a pipeline without its schedule, parts
    of a larger design such as actor and critic, or a mistake. Each clips and skips by its own
    gradients alone. Ranks that train the same parameters may be independent trainings, or lack a
    wrapper.

    There is no collective, because independent trainings may do their updates at any time. So the
    first rank does its first update before the others have announced theirs. It looks again in its
    second, fourth, eighth, ... update. The later rank finds the difference in its first update.

    A difference is reported once for each network: that ranks clip and skip without each other is
    true of all later updates. A second network, or a network with a new cell, is compared again.

    Args:
        trained: Parameters that this rank trains, by name.
        announced: Announcements of the process group.
        are_refused: Whether a difference is an error. If not, it is logged: this rank exchanges its
            gradients with some of the ranks, so the design is deliberate.
    """

    def __init__(
        self, trained: Mapping[str, nn.Parameter], announced: Announcements, *, are_refused: bool
    ) -> None:
        self._trained = trained
        self._announced = announced
        self._are_refused = are_refused
        self._digest = self._text = ""
        self._num_updates = 0

    def compare(self, *, ends: bool) -> bool:
        """Compare the ranks; call it in each update until it returns true.

        Args:
            ends: Whether this is the last call in its update.

        Returns:
            Whether no further call is needed.

        Raises:
            RuntimeError: If another rank trains other parameters, and these are refused.
        """
        is_due = (self._num_updates + 1).bit_count() == 1
        self._num_updates += ends
        if not is_due:
            return False
        if not self._digest:
            self._describe()
        try:
            self._announced.announce(self._digest, self._text)
            if self._announced.all_agree(self._digest):
                return True
            other = self._announced.who_differs(self._digest)
        except distributed.DistError:
            # The process that hosts the store has ended. That ends no independent training.
            return True
        if other is None:
            return False
        rank, text = other
        found = f"rank {self._announced.rank} trains {self._text}, but rank {rank} trains {text}"
        if self._are_refused:
            msg = (
                f"cannot train: {found}, and each would clip and skip by its own gradients alone; "
                "pass the schedule of torch.distributed.pipelining to MFTrainOneStepCell if these "
                "are stages of a pipeline, or start independent trainings without a common process "
                "group"
            )
            raise RuntimeError(msg)
        _logger.warning(
            "%s: they clip and skip without each other. If they are stages of a pipeline, pass its "
            "schedule to MFTrainOneStepCell",
            found,
        )
        return True

    def _describe(self) -> None:
        described = [
            f"`{name}` {str(p.dtype).removeprefix('torch.')}{list(p.shape)}"
            for name, p in self._trained.items()
            if p.requires_grad
        ]
        self._digest = hashlib.sha256("\n".join(described).encode()).hexdigest()
        more = len(described) - _MOST_NAMED
        shown = [*described[:_MOST_NAMED], *([f"{more} more"] if more > 0 else [])]
        self._text = " and ".join(shown)
        if self._are_refused:
            warnings.warn(
                "no wrapper reduces the gradients of this network over the ranks of the process "
                "group, so each rank trains, clips and skips alone; wrap the network in "
                "DistributedDataParallel or fully_shard, unless the trainings are independent",
                stacklevel=callers_stacklevel(),
            )
