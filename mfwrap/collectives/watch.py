"""Notice ranks that leave a training or fall behind, and say where they are.

A rank that waits inside a collective cannot tell why: the call is in C++, and no Python code of the
waiting thread runs until the backend's timeout. So each rank has a thread that exchanges short
messages with the other ranks through the key-value store of ``torch.distributed``. The training
steps themselves only count updates: they neither communicate nor synchronize for this purpose.

Each thread does two things every second: it publishes the number of its rank's update, and it looks
for a question. When an update takes long, the thread of the waiting rank asks; each thread answers
with the place of its main thread in the program.
"""

import atexit
import contextlib
import json
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, final

from torch import distributed

from mfwrap.collectives.calls import num_ranks, this_rank
from mfwrap.collectives.places import main_thread_place, named_ranks

_SECONDS_BETWEEN_LOOKS = 1.0
_SECONDS_FOR_ANSWERS = 4.0
_HAS_RAISED = "has raised"
_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.02
SECONDS_BEFORE_REPORT = 15.0
"""Time after which an update counts as waiting for other ranks."""

_logger = logging.getLogger("mfwrap")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankStatus:
    """What one rank says about itself."""

    training: int = 0
    """Number of the training in this process; 0 for a loop without `RankWatch.training`."""

    begun: int = 0
    """Number of updates that the rank has begun."""

    done: int = 0
    """Number of updates that the rank has finished."""

    end: str = ""
    """How the rank's training ended; empty while it trains."""

    place: str = ""
    """Where the rank's main thread is; empty if the rank has not answered."""

    @property
    def has_failed(self) -> bool:
        """Whether an error has ended the rank's last update."""
        return self.end.startswith(_HAS_RAISED)

    @property
    def answers(self) -> bool:
        """Whether the rank has answered, or has said that its training has ended."""
        return bool(self.place or self.end)

    def description(self, rank: int) -> str:
        """Return the status of a rank in words."""
        where = f"in update {self.begun}" if self.begun > self.done else f"after update {self.done}"
        if self.end:
            return f"rank {rank} {self.end}"
        if not self.place:
            return f"rank {rank} does not answer and was last seen {where}"
        return f"rank {rank} is {where}, at {self.place}"


@final
class RankWatch:
    """Count this rank's updates, and report the ranks for which an update waits.

    A report is one sentence in the log (logger ``mfwrap``) of every rank whose process still runs.

    Args:
        store: Key-value store that the ranks share. The watch opens a connection of its own.
        rank: This rank.
        num_ranks: Number of ranks.
    """

    def __init__(self, store: Any, rank: int, num_ranks: int) -> None:
        self.belongs_to = store
        self._store = distributed.distributed_c10d.PrefixStore("mfwrap/watch", store.clone())
        self._rank = rank
        self._ranks = range(num_ranks)
        self._members: Sequence[int] = self._ranks
        self._training = self._begun = self._done = 0
        self._end = ""
        self._published: RankStatus | None = None
        self._question = 0
        self._unread: list[int] = []
        self._lock = threading.Lock()
        self._since = time.monotonic()
        self._patience = SECONDS_BEFORE_REPORT
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mfwrap-watch", daemon=True)
        self._thread.start()
        # At exit, Python ends a daemon thread when it returns from C++. If that happens inside of
        # torch, the process aborts.
        atexit.register(self.close)

    def close(self) -> None:
        """Stop the thread."""
        atexit.unregister(self.close)
        self._is_over.set()
        self._thread.join()

    def begin_update(self, members: Sequence[int] | None = None) -> None:
        """Note that an update has begun; only sets attributes.

        Args:
            members: Ranks that take part in the update; ``None`` for all ranks.
        """
        self._begun = self._done + 1
        self._end = ""
        if members is not None:
            self._members = members

    def end_update(self) -> None:
        """Note that the update has ended; only sets an attribute."""
        self._done = self._begun

    @contextlib.contextmanager
    def training(self) -> Iterator[None]:
        """Count the updates within the block from 0, and explain an error that leaves it.

        All ranks must enter and leave the block equally often.
        """
        self._begun = self._done = 0
        self._end = ""
        self._members = self._ranks
        self._training += 1
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
            if self._end:
                # An inner block has explained the error.
                raise
            message = str(error).partition("\n")[0]
            self._end = f"{_HAS_RAISED} {type(error).__name__} in update {self._begun}: {message}"
            # If the process that hosts the store has ended, the other ranks cannot be asked.
            with contextlib.suppress(distributed.DistError):
                self._publish()
                missing = [
                    status.description(rank)
                    for rank, status in self.ask().items()
                    # An error that is the same on all ranks needs no explanation.
                    if (status.end or not status.answers) and status.end != self._end
                ]
                if missing:
                    error.add_note(f"Other ranks: {'; '.join(missing)}.")
            raise

    def end_training(self) -> None:
        """Wait until all ranks have ended their training; call it where the ranks meet anyway.

        Raises:
            RuntimeError: If another rank has begun a further update, for which this rank has no
                batch. The other rank would wait for this rank forever.
        """
        with contextlib.suppress(distributed.DistError):
            self._store.set(self._ending(self._rank), str(self._done))
            self._end = f"has ended its training after update {self._done}"
            self._publish()
        for rank in self._ranks:
            while not self._has_ended(rank):
                status = self._last_seen(rank)
                is_same = status.training == self._training
                if is_same and status.begun > self._done:
                    self._refuse_end(rank, status)
                if is_same and status.end:
                    # The rank has raised an error. This rank's next collective raises, too.
                    return

    def _refuse_end(self, rank: int, status: RankStatus) -> None:
        msg = (
            f"rank {self._rank} has no batch for update {self._done + 1}, but rank {rank} has "
            f"begun update {status.begun}; give every rank the same number of batches"
        )
        self._end = f"has ended its training after update {self._done}"
        self._tell(msg)
        raise RuntimeError(msg)

    def _ending(self, rank: int) -> str:
        return f"ending/{self._training}/{rank}"

    def _has_ended(self, rank: int) -> bool:
        try:
            return has_keys(self._store, [self._ending(rank)], _SECONDS_BETWEEN_LOOKS)
        except distributed.DistError:
            # The store is gone, because the process that hosts it has ended.
            return True

    def ask(self) -> dict[int, RankStatus]:
        """Ask the other ranks where they are; return the status of each.

        If a rank does not answer within some seconds, its status is the one that it published last,
        which has no place.
        """
        with self._lock:
            number = self._question
            self._store.set(f"question/{number}", "")
            self._answer()
        others = [rank for rank in self._ranks if rank != self._rank]
        found: dict[int, RankStatus] = {}
        deadline = time.monotonic() + _SECONDS_FOR_ANSWERS
        for rank in others:
            seen = self._last_seen(rank)
            key = f"answer/{number}/{rank}"
            # A rank that has ended may have no thread any more, so do not wait for its answer.
            seconds = 0.0 if seen.end else deadline - time.monotonic()
            if has_keys(self._store, [key], seconds):
                seen = RankStatus(**json.loads(self._store.get(key)))
            found[rank] = seen
        return found

    def _run(self) -> None:
        try:
            while distributed.is_initialized() and _default_store() is self.belongs_to:
                self._publish()
                self._read_reports()
                with self._lock:
                    while self._store.check([f"question/{self._question}"]):
                        self._answer()
                self._report_waiting()
                if self._is_over.wait(_SECONDS_BETWEEN_LOOKS):
                    return
        except distributed.DistError:
            # The process that hosts the store has ended. The main thread's next collective raises.
            return

    def _status(self, place: str = "") -> RankStatus:
        return RankStatus(
            training=self._training,
            begun=self._begun,
            done=self._done,
            end=self._end,
            place=place,
        )

    def _publish(self) -> None:
        status = self._status()
        if status != self._published:
            self._since = time.monotonic()
            self._patience = SECONDS_BEFORE_REPORT
            self._store.set(f"seen/{self._rank}", json.dumps(asdict(status)))
            self._published = status

    def _last_seen(self, rank: int) -> RankStatus:
        key = f"seen/{rank}"
        if not self._store.check([key]):
            return RankStatus()
        return RankStatus(**json.loads(self._store.get(key)))

    def _answer(self) -> None:
        status = self._status(main_thread_place())
        self._store.set(f"answer/{self._question}/{self._rank}", json.dumps(asdict(status)))
        self._unread.append(self._question)
        self._question += 1

    def _report_waiting(self) -> None:
        """Report the ranks that have not begun this rank's update, if the update takes long."""
        begun, waited = self._begun, time.monotonic() - self._since
        if begun == self._done or self._end or waited < self._patience:
            return
        # Ask again later: another rank may fall behind, and an update may just be long.
        self._patience *= 2
        behind = {
            rank: status
            for rank, status in self.ask().items()
            if rank in self._members
            and ((status.training, status.begun) < (self._training, begun) or status.end)
        }
        if behind and begun == self._begun:
            places = "; ".join(status.description(rank) for rank, status in behind.items())
            self._tell(
                f"rank {self._rank} has waited {waited:.0f} s in update {begun} for "
                f"{named_ranks(behind)}: {places}"
            )

    def _tell(self, report: str) -> None:
        """Write a report to the logs of all ranks."""
        with self._lock:
            number = self._question
            self._store.set(f"report/{number}", report)
            self._store.set(f"question/{number}", "")
            self._answer()
            self._unread.remove(number)
        _logger.warning(report)

    def _read_reports(self) -> None:
        """Log the reports of other ranks."""
        for number in list(self._unread):
            key = f"report/{number}"
            if self._store.check([key]):
                self._unread.remove(number)
                _logger.warning(self._store.get(key).decode())
        del self._unread[:-4]


def has_keys(store: Any, keys: list[str], seconds: float) -> bool:
    """Wait until a store has some keys; return whether it has them after at most some seconds.

    Unlike the store's own ``wait``, this leaves the connection free for other threads in between,
    and writes no warnings to stderr.
    """
    deadline, pause = time.monotonic() + seconds, _SHORTEST_PAUSE
    while not store.check(keys):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True


_current: RankWatch | None = None


def rank_watch() -> RankWatch | None:
    """Return the watch of this process, and start it if needed; ``None`` with one rank."""
    global _current  # noqa: PLW0603  (one watch per process and process group)
    if num_ranks() == 1:
        return None
    store = _default_store()
    if _current is None or _current.belongs_to is not store:
        if _current is not None:
            _current.close()
        try:
            _current = RankWatch(store, this_rank(), num_ranks())
        except (RuntimeError, NotImplementedError):
            # A store that cannot be cloned, such as that of torch's fake process group.
            return None
    return _current


def _default_store() -> Any:
    return distributed.distributed_c10d._get_default_store()  # noqa: SLF001  (no public name)
