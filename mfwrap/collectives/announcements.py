"""Compare what ranks do without each other, through the key-value store of ``torch.distributed``.

A collective must be started by all ranks. Ranks that train without each other may do so at any
time, or not at all, so they cannot be compared by a collective. Instead each rank announces what it
does, and looks at the announcements of the others. It waits only for ranks that have announced
something else.

`all_ranks_meet` lets a rank start a collective that the other ranks may not have reason to start.
"""

import time
from typing import Any, final

from torch import distributed

from mfwrap.collectives.calls import num_ranks, this_rank
from mfwrap.collectives.store import has_keys, new_connection
from mfwrap.compatibility.torch import default_store


@final
class Announcements:
    """Announce what this rank does, and find the ranks that do something else.

    Args:
        store: Key-value store that the ranks share.
        rank: This rank.
        num_ranks: Number of ranks.
        seconds_to_follow: Time that another rank has to announce the same as this rank, if it has
            announced only other things.
    """

    def __init__(
        self, store: Any, rank: int, num_ranks: int, seconds_to_follow: float = 5.0
    ) -> None:
        self.belongs_to = store
        self._store = distributed.distributed_c10d.PrefixStore("mfwrap/announcements", store)
        self.rank = rank
        """This rank."""
        self._others = [other for other in range(num_ranks) if other != rank]
        self._own: list[str] = []
        self._seconds_to_follow = seconds_to_follow

    def announce(self, digest: str, text: str) -> None:
        """Tell the other ranks what this rank is about to do.

        Args:
            digest: Short string without spaces that is equal on ranks that do the same.
            text: Description for messages.
        """
        if digest not in self._own:
            self._own.append(digest)
            self._store.set(f"{self.rank}/{digest}", "")
        # Set the text last: a rank that has a text has its digest, too.
        self._store.set(str(self.rank), f"{digest} {text}")

    def all_agree(self, digest: str) -> bool:
        """Return whether all other ranks have announced `digest`."""
        return bool(self._store.check([f"{rank}/{digest}" for rank in self._others]))

    def who_differs(self, digest: str) -> tuple[int, str] | None:
        """Return a rank that does something else, and its description; ``None`` if there is none.

        Such a rank has not announced `digest`, and has announced last what this rank never has. It
        has `seconds_to_follow` to announce `digest`. Of two ranks that announce different
        things, the later one finds the announcement of the earlier one, unless the earlier one has
        announced something common again; then it finds it when it looks again.

        Args:
            digest: Digest that this rank has announced last.
        """
        deadline = time.monotonic() + self._seconds_to_follow
        for rank in self._others:
            if not self._store.check([str(rank)]) or self._store.check([f"{rank}/{digest}"]):
                continue
            # A rank whose last announcement is one of this rank's is behind, and may follow.
            last, _, text = self._store.get(str(rank)).decode().partition(" ")
            if last in self._own:
                continue
            if not has_keys(self._store, [f"{rank}/{digest}"], deadline - time.monotonic()):
                return rank, text
        return None


_current: Announcements | None = None


def rank_announcements() -> Announcements:
    """Return the announcements of this process in the present process group."""
    global _current  # noqa: PLW0603  (one object per process and process group)
    store = default_store()
    if _current is None or _current.belongs_to is not store:
        _current = Announcements(store, this_rank(), num_ranks())
    return _current


def all_ranks_meet(topic: str, seconds: float = 5.0) -> bool:
    """Return whether all ranks call this function for the same topic at about the same time.

    If the answer is true on a rank, it is true on all ranks, and all of them are here: they may
    start a collective. A rank that calls it alone waits for `seconds` and gets false. The function
    itself starts no collective. Call it only where something unusual has happened.

    Args:
        topic: Short string. Ranks may call this several times for a topic.
        seconds: Longest time to wait for the other ranks.
    """
    if num_ranks() == 1:
        return True
    try:
        store = new_connection(default_store(), "mfwrap/meetings")
        return store is not None and _meet(store, topic, seconds, this_rank(), num_ranks())
    except distributed.DistError:
        # The process that hosts the store has ended.
        return False


def _meet(store: Any, topic: str, seconds: float, rank: int, num_ranks: int) -> bool:
    # A meeting has one answer. Ranks that come later begin another meeting, so that the arrival at
    # an earlier one does not count.
    number = 0
    while store.check([f"{topic}/{number}/answer"]):
        number += 1
    meeting = f"{topic}/{number}"
    store.set(f"{meeting}/{rank}", "")
    keys = [f"{meeting}/{each}" for each in range(num_ranks)]
    are_here = has_keys(store, keys, seconds)
    # The first answer counts for all ranks of a meeting. A rank leaves only after an answer, and a
    # true answer needs all ranks to have arrived, so no rank can have left when it is given.
    answer = store.compare_set(f"{meeting}/answer", "", "true" if are_here else "false")
    return bool(answer == b"true")
