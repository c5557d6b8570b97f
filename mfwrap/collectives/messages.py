"""Exchange short messages between ranks through the key-value store of ``torch.distributed``."""

import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, final

from mfwrap.collectives.progress import RankStatus
from mfwrap.collectives.store import has_keys

_SECONDS_FOR_ANSWERS = 4.0

_logger = logging.getLogger("mfwrap")


@final
class RankMessages:
    """Publish the status of this rank, ask the other ranks for theirs, and write to all logs.

    A thread of each rank must call `answer_all` and `read_reports` about once a second. All methods
    may raise ``torch.distributed.DistError`` if the process that hosts the store has ended.

    Args:
        store: Key-value store that the ranks share, used by this object only.
        rank: This rank.
        num_ranks: Number of ranks.
        status: Returns the status of this rank with its place.
    """

    def __init__(
        self, store: Any, rank: int, num_ranks: int, status: Callable[[], RankStatus]
    ) -> None:
        self._store = store
        self._rank = rank
        self._ranks = range(num_ranks)
        self._status = status
        self._question = 0
        self._unread: list[int] = []
        self._lock = threading.Lock()

    def publish(self, status: RankStatus) -> None:
        """Publish the status of this rank."""
        self._store.set(f"seen/{self._rank}", json.dumps(asdict(status)))

    def last_seen(self, rank: int) -> RankStatus:
        """Return the status that a rank has published last."""
        key = f"seen/{rank}"
        if not self._store.check([key]):
            return RankStatus()
        return RankStatus(**json.loads(self._store.get(key)))

    def ask(self) -> dict[int, RankStatus]:
        """Ask the other ranks where they are; return the status of each.

        A rank that does not answer within some seconds has a status without a place: the last one
        that it published.
        """
        with self._lock:
            number = self._question
            self._store.set(f"question/{number}", "")
            self._answer()
        others = [rank for rank in self._ranks if rank != self._rank]
        found: dict[int, RankStatus] = {}
        deadline = time.monotonic() + _SECONDS_FOR_ANSWERS
        for rank in others:
            seen = self.last_seen(rank)
            key = f"answer/{number}/{rank}"
            # A rank that has ended may have no thread any more, so do not wait for its answer.
            seconds = 0.0 if seen.end else deadline - time.monotonic()
            if has_keys(self._store, [key], seconds):
                seen = RankStatus(**json.loads(self._store.get(key)))
            found[rank] = seen
        return found

    def answer_all(self) -> None:
        """Answer the questions of the other ranks."""
        with self._lock:
            while self._store.check([f"question/{self._question}"]):
                self._answer()

    def _answer(self) -> None:
        status = json.dumps(asdict(self._status()))
        self._store.set(f"answer/{self._question}/{self._rank}", status)
        self._unread.append(self._question)
        self._question += 1

    def tell(self, report: str) -> None:
        """Write a report to the logs of all ranks."""
        with self._lock:
            number = self._question
            self._store.set(f"report/{number}", report)
            self._store.set(f"question/{number}", "")
            self._answer()
            self._unread.remove(number)
        _logger.warning(report)

    def read_reports(self) -> None:
        """Log the reports of other ranks."""
        for number in list(self._unread):
            key = f"report/{number}"
            if self._store.check([key]):
                self._unread.remove(number)
                _logger.warning(self._store.get(key).decode())
        del self._unread[:-4]
