"""Notice ranks that leave a training or fall behind, and say where they are.

A rank that waits inside a collective cannot tell why: the call is in C++, and no Python code of the
waiting thread runs until the backend's timeout. So each rank has a thread that exchanges short
messages with the other ranks through the key-value store of ``torch.distributed``. The training
steps themselves only count updates: they neither communicate nor synchronize for this purpose.

Each thread does two things every second: it publishes the number of its rank's update, and it looks
for a question. When an update takes long, the thread of the waiting rank asks; each
thread answers with the place of its main thread in the program.
"""

import atexit
import contextlib
import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Never, final

from torch import distributed

from mfwrap.collectives.calls import num_ranks, this_rank
from mfwrap.collectives.launch import warn_of_shared_store
from mfwrap.collectives.messages import RankMessages
from mfwrap.collectives.places import main_thread_place, named_ranks
from mfwrap.collectives.progress import Progress, RankStatus
from mfwrap.collectives.store import has_keys, new_connection
from mfwrap.compatibility.torch import default_store

_SECONDS_BETWEEN_LOOKS = 1.0
_LOOKS_BETWEEN_QUESTIONS = 5
SECONDS_BEFORE_REPORT = 15.0
"""Time after which an update counts as waiting for other ranks."""


@final
class RankWatch:
    """Count this rank's updates, and report the ranks for which it waits.

    A report is one sentence in the log (logger ``mfwrap``) of every rank whose process still runs.

    Args:
        store: Key-value store that the ranks share.
        connection: The watch's own connection to the store, see `new_connection`.
        rank: This rank.
        num_ranks: Number of ranks.
    """

    def __init__(self, store: Any, connection: Any, rank: int, num_ranks: int) -> None:
        self.belongs_to = store
        self._store = connection
        self._rank = rank
        self._ranks = range(num_ranks)
        self._members: Sequence[int] = self._ranks
        self._progress = Progress()
        self._messages = RankMessages(self._store, rank, num_ranks, self._located_status)
        self._published: RankStatus | None = None
        self._waits_in: tuple[int, int] | None = None
        self._since = time.monotonic()
        self._patience = SECONDS_BEFORE_REPORT
        self._has_lost_store = False
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mfwrap-watch", daemon=True)
        self._thread.start()
        # At exit, Python ends a daemon thread when it returns from C++. If that happens inside of
        # torch, the process aborts.
        atexit.register(self.close)

    def close(self) -> None:
        """Stop the thread; tell the other ranks that this rank has ended."""
        atexit.unregister(self.close)
        self._is_over.set()
        self._thread.join()
        if not self._has_lost_store:
            self.leave("has ended its program")

    def go_on(self) -> None:
        """Note that this rank has met the other ranks again after an error, which is forgotten."""
        if self._progress.status.has_failed:
            self._progress.go_on()
            # A rank that asks does not wait for the answer of a rank that has failed.
            self._publish()

    def leave(self, what: str) -> None:
        """Tell the other ranks that this rank does no further update.

        Args:
            what: What the rank has done, for example ``has ended its training``.
        """
        self._progress.leave(what)
        # Without the store nobody can be told: the process that hosts it has ended.
        with contextlib.suppress(distributed.DistError):
            self._publish()

    def begin_update(self, members: Sequence[int] | None = None) -> None:
        """Note that an update has begun; only sets attributes.

        Args:
            members: Ranks that take part in the update; ``None`` for all ranks.
        """
        self._progress.begin_update()
        if members is not None:
            self._members = members

    def end_update(self) -> None:
        """Note that the update has ended; only sets attributes."""
        self._progress.end_update()

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Count the updates within the block from 0, and explain an error that leaves it.

        All ranks must enter and leave the block equally often.
        """
        self._progress.begin_training()
        self._members = self._ranks
        with self.explaining():
            yield

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Add a note to an error that leaves the block if other ranks are missing.

        The note names each rank that has raised an error, has ended its training or does not
        answer. The other ranks learn of the error.
        """
        try:
            yield
        except Exception as error:
            if self._progress.status.end:
                # An inner block has explained the error.
                raise
            self._progress.fail(error)
            note = self._missing()
            if note:
                error.add_note(note)
            raise

    def _missing(self) -> str:
        """Return which ranks have failed, ended or do not answer; empty if there is none."""
        end = self._progress.status.end
        try:
            self._publish()
            found = self._messages.ask()
        except distributed.DistError:
            return (
                "Other ranks: the key-value store of torch.distributed cannot be reached. The "
                "process that hosts it, rank 0 or the launcher, has probably ended."
            )
        missing = [
            status.description(rank)
            for rank, status in found.items()
            # An error that is the same on all ranks needs no explanation.
            if (status.end or not status.answers) and status.end != end
        ]
        return f"Other ranks: {'; '.join(missing)}." if missing else ""

    def end_training(self) -> None:
        """Wait until all ranks have ended their training; call it where the ranks meet anyway.

        Raises:
            RuntimeError: If another rank has begun a further update, for which this rank has no
                batch. The other rank would wait for this rank forever.
        """
        with contextlib.suppress(distributed.DistError):
            self._store.set(self._ending(self._rank), str(self._progress.status.done))
        self.leave("has ended its training")
        own = self._progress.status
        for rank in self._ranks:
            looks = silences = 0
            while not self._has_ended(rank):
                looks += 1
                if looks % _LOOKS_BETWEEN_QUESTIONS == 0:
                    silences += not self._messages.ask()[rank].answers
                    if silences > 1:
                        # Its process has ended or hangs. The next collective shows which.
                        return
                status = self._messages.last_seen(rank)
                is_same = status.training == own.training
                if is_same and status.begun > own.done:
                    self._refuse_end(rank, status)
                if is_same and status.end:
                    # The rank has raised an error. This rank's next collective raises, too.
                    return

    def _refuse_end(self, rank: int, status: RankStatus) -> Never:
        msg = (
            f"rank {self._rank} has no batch for update {self._progress.status.done + 1}, but rank "
            f"{rank} has begun update {status.begun}; give every rank the same number of batches"
        )
        self._messages.tell(msg)
        raise RuntimeError(msg)

    def _ending(self, rank: int) -> str:
        return f"ending/{self._progress.status.training}/{rank}"

    def _has_ended(self, rank: int) -> bool:
        try:
            return has_keys(self._store, [self._ending(rank)], _SECONDS_BETWEEN_LOOKS)
        except distributed.DistError:
            # The store is gone, because the process that hosts it has ended.
            return True

    def _run(self) -> None:
        try:
            while distributed.is_initialized() and default_store() is self.belongs_to:
                self._publish()
                self._messages.read_reports()
                self._messages.answer_all()
                self._look_for_missing()
                if self._is_over.wait(_SECONDS_BETWEEN_LOOKS):
                    return
            self.leave("has left its process group")
        except distributed.DistError:
            # The process that hosts the store has ended. The main thread's next collective raises.
            self._has_lost_store = True

    def _located_status(self) -> RankStatus:
        return dataclasses.replace(self._progress.status, place=main_thread_place())

    def _publish(self) -> None:
        status = self._progress.status
        if status != self._published:
            self._messages.publish(status)
            self._published = status

    def _look_for_missing(self) -> None:
        """Report the ranks for which this rank has waited long in an update."""
        waits_in = self._progress.waits_in()
        if waits_in != self._waits_in:
            self._waits_in = waits_in
            self._since = time.monotonic()
            self._patience = SECONDS_BEFORE_REPORT
        waited = time.monotonic() - self._since
        if waits_in is None or waited < self._patience:
            return
        # Ask again later: another rank may fall behind, and an update may just be long.
        self._patience *= 2
        behind = {
            rank: status
            for rank, status in self._messages.ask().items()
            if rank in self._members and ((status.training, status.begun) < waits_in or status.end)
        }
        if behind and waits_in == self._progress.waits_in():
            places = "; ".join(status.description(rank) for rank, status in behind.items())
            self._messages.tell(
                f"rank {self._rank} has waited {waited:.0f} s in update {waits_in[1]} for "
                f"{named_ranks(behind)}: {places}"
            )


_current: RankWatch | None = None


def rank_watch() -> RankWatch | None:
    """Return the watch of this process, and start it if needed; ``None`` with one rank."""
    global _current  # noqa: PLW0603  (one watch per process and process group)
    if num_ranks() == 1:
        return None
    store = default_store()
    if _current is None or _current.belongs_to is not store:
        if _current is not None:
            _current.close()
            _current = None
        try:
            connection = new_connection(store, "mfwrap/watch")
        except distributed.DistError:
            # The process that hosts the store has ended. The next collective raises.
            connection = None
        if connection is None:
            return None
        warn_of_shared_store()
        _current = RankWatch(store, connection, this_rank(), num_ranks())
    return _current
