"""Check the ranks before the first update of a network, and watch them in every update."""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import final

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from mfwrap.collectives import num_ranks, rank_announcements, rank_watch, ranks_of
from mfwrap.preflight import Facts, check_ranks_agree
from mfwrap.step.ranks.fsdp import ShardedParts
from mfwrap.step.ranks.others import OtherRanks
from mfwrap.tensors.shards import is_distributed


@final
class RankGuard:
    """Check before the first update that the ranks agree, and watch them in every update.

    Args:
        group: Ranks that update the network together; ``None`` for all ranks.
        facts: Returns what must be the same on all ranks. Called once, before the first update.
        warned: Topics of the facts whose differences are only logged.
        problems: Returns sentences that say what keeps this rank from training. Called once, before
            the first update.
        others: Ranks outside of the group, which are compared, too; ``None`` for none.
    """

    def __init__(
        self,
        group: "distributed.ProcessGroup | None",
        facts: Callable[[], Facts],
        warned: Sequence[str] = (),
        problems: Callable[[], Sequence[str]] = tuple,
        others: OtherRanks | None = None,
    ) -> None:
        self._group = group
        self._ranks = ranks_of(group)
        self._facts = facts
        self._warned = warned
        self._problems = problems
        self._others = others
        self.is_checked = False
        """Whether the ranks have been compared."""

    @contextlib.contextmanager
    def updating(self, *, ends: bool) -> Iterator[None]:
        """Do an update, or a part of it, within the block; add a note on other ranks to errors.

        Costs a few microseconds on the host. Only the first update communicates; ranks outside of
        the group are also looked for in the second, fourth, eighth, ... update.

        Args:
            ends: Whether the update ends with the block.

        Raises:
            RuntimeError: If the ranks disagree before the first update.
        """
        watch = rank_watch()
        if watch is None:
            self._check(ends=ends)
            yield
            return
        watch.begin_update(self._ranks)
        with watch.explaining():
            self._check(ends=ends)
            yield
        if ends:
            watch.end_update()

    def _check(self, *, ends: bool) -> None:
        if not self.is_checked:
            problems = self._problems()
            check_ranks_agree(self._facts(), problems, group=self._group, warned=self._warned)
            self.is_checked = True
        if self._others is not None and self._others.compare(ends=ends):
            self._others = None


@final
class LoneGuard:
    """Compare this rank with the others, which train without it, in some of its updates.

    Args:
        others: The other ranks.
    """

    def __init__(self, others: OtherRanks) -> None:
        self._others = others
        self.is_checked = False
        """Whether the ranks have been compared."""

    @contextlib.contextmanager
    def updating(self, *, ends: bool) -> Iterator[None]:
        """Do an update, or a part of it, within the block.

        Args:
            ends: Whether the update ends with the block.

        Raises:
            RuntimeError: If another rank trains other parameters.
        """
        if not self.is_checked:
            self.is_checked = self._others.compare(ends=ends)
        yield


def rank_guard(
    trained: Mapping[str, nn.Parameter],
    parts: Sequence[DistributedDataParallel],
    sharded: ShardedParts,
    facts: Callable[[], Facts],
    warned: Sequence[str] = (),
) -> RankGuard | LoneGuard | None:
    """Return the guard of a network; ``None`` if no other rank takes part in its updates.

    Start the watch of the ranks, which then answers even if this rank never gets a batch.

    Args:
        trained: Parameters that are trained, by name.
        parts: DistributedDataParallel modules of the networks.
        sharded: Sharded parts of the networks.
        facts: As in `RankGuard`.
        warned: As in `RankGuard`.
    """
    # torch's fake process group has no other processes, and a store without keys. It has no watch.
    if rank_watch() is None:
        return None
    group = parts[0].process_group if parts else sharded.group
    if group is not None and len(ranks_of(group)) > 1:
        spans_all = len(ranks_of(group)) == num_ranks()
        others = OtherRanks(trained, rank_announcements(), are_refused=False)
        return RankGuard(group, facts, warned, others=None if spans_all else others)
    # Other distributed tensors, and shards with replicas on some of the ranks, have a group for
    # each dimension of their mesh, but none for the whole mesh.
    # DistributedDataParallel over a group of one rank says that the rank trains alone.
    is_joined = bool(parts) or any(map(is_distributed, trained.values()))
    return LoneGuard(OtherRanks(trained, rank_announcements(), are_refused=not is_joined))
