"""Stop a training on SIGTERM after a step that all ranks finish."""

import contextlib
import itertools
import signal
import threading
import warnings
from types import FrameType, TracebackType
from typing import Any, Protocol, Self, final

import torch
from torch import distributed

from mfwrap.collectives import any_rank, num_ranks, this_rank

_SECONDS_BETWEEN_CHECKS = 0.5
_trainings = itertools.count()


@final
class RankTermination:
    """Within a ``with`` block, turn a SIGTERM at any rank into one last step for all ranks.

    With one process, the last step is the one during which the signal came. With several, a thread
    of each rank asks ``torch.distributed``'s key-value store twice a second whether another rank
    received the signal. So a training step itself sends no message and never waits.
    """

    def __init__(self) -> None:
        self._sigterm = SigtermFlag()
        self._last_step: LastStep | None = None
        self.is_stopping = False
        """Whether the last step that `stops_after` was asked about is the final one; the same on
        all ranks."""

    def __enter__(self) -> Self:
        self.is_stopping = False
        if num_ranks() > 1:
            self._last_step = _last_step_of_all_ranks()
        self._sigterm.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._sigterm.__exit__(kind, error, traceback)
        if self._last_step is not None:
            self._last_step.close()
            self._last_step = None

    def stops_after(self, step: int) -> bool:
        """Return whether training must stop now that a step is finished.

        Call it after each step, on all ranks. Steps must count up by one, and must have the same
        numbers on all ranks.
        """
        is_requested = self._sigterm.is_set
        if self._last_step is None:
            self.is_stopping = is_requested
        else:
            self.is_stopping = self._last_step.is_reached(step, is_requested=is_requested)
        return self.is_stopping

    def conclude(self, device: torch.device) -> bool:
        """Return whether any rank has received a SIGTERM; later signals are not handled.

        Call it on all ranks when the training has ended. The ranks wait for each other.

        Args:
            device: Device whose tensors the ranks can exchange.
        """
        self._sigterm.__exit__(None, None, None)
        if self._last_step is None:
            return self._sigterm.is_set
        # Answer first: another rank may be waiting to learn which step this rank has begun.
        self._last_step.close()
        return any_rank(flag=self._sigterm.is_set, device=device)


def _last_step_of_all_ranks() -> "LastStep":
    # Clone the store: on a shared connection, a rank that waits would block all other requests.
    store: Any = distributed.distributed_c10d._get_default_store()  # noqa: SLF001  (no public name)
    names = f"mfwrap/termination/{next(_trainings)}/"
    return LastStep(store.clone(), names, this_rank(), num_ranks())


class KeyValueStore(Protocol):
    """The methods of ``torch.distributed``'s stores that `LastStep` uses."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys have values."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Wait until all keys have values, and return the values."""


@final
class LastStep:
    """Agreement of all ranks on the last step, once any rank has asked for an end.

    1. The rank that received the signal sets the key ``asked`` in the store.
    2. Each rank, in a thread, sees that key and answers with the number of the step it has begun.
    3. A rank that has answered begins no further step before it has read all answers.
    4. The largest answer is the last step. No rank has gone past it, because a rank's answer is
       never smaller than a step it has begun; and ranks that answered less still do the steps up
       to it.

    Args:
        store: Key-value store that the ranks share.
        names: Prefix of its keys, which nothing else may use.
        rank: This rank.
        num_ranks: Number of ranks.
    """

    def __init__(self, store: KeyValueStore, names: str, rank: int, num_ranks: int) -> None:
        self._store = store
        self._asked = f"{names}asked"
        self._answers = [f"{names}{number}" for number in range(num_ranks)]
        self._own_answer = self._answers[rank]
        self._lock = threading.Lock()
        self._begun = 0
        self._has_answered = False
        self._number: int | None = None
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="mfwrap-termination", daemon=True)
        self._thread.start()

    def is_reached(self, step: int, *, is_requested: bool) -> bool:
        """Return whether a finished step is the last one. If not, the next step counts as begun.

        Args:
            step: Number of the finished step.
            is_requested: Whether this rank has received a SIGTERM.
        """
        with self._lock:
            if is_requested and not self._has_answered:
                self._begun = step
                self._store.set(self._asked, "")
                self._answer()
            if not self._has_answered:
                self._begun = step + 1
                return False
        if self._number is None:
            self._number = max(int(answer) for answer in self._store.multi_get(self._answers))
        return step >= self._number

    def close(self) -> None:
        """Stop listening, and leave an answer for ranks that ask later."""
        self._is_over.set()
        self._thread.join()
        # If the store is gone, no rank is waiting at it.
        with self._lock, contextlib.suppress(distributed.DistError):
            self._answer()

    def _answer(self) -> None:
        if not self._has_answered:
            self._store.set(self._own_answer, str(self._begun))
            self._has_answered = True

    def _listen(self) -> None:
        try:
            while not self._is_over.wait(_SECONDS_BETWEEN_CHECKS):
                if self._store.check([self._asked]):
                    with self._lock:
                        self._answer()
                    return
        except distributed.DistError as error:
            warnings.warn(
                "lost the connection to the key-value store of torch.distributed, so a SIGTERM at "
                f"another rank will not be noticed: {error}",
                stacklevel=2,
            )


@final
class SigtermFlag:
    """Within a ``with`` block, note the first SIGTERM; the second one ends the process at once.

    Python handles signals in the main thread only. In any other thread the block does nothing.
    """

    def __init__(self) -> None:
        self.is_set = False
        """Whether the process has received a SIGTERM in the current or last block."""
        self._before: Any = None

    def __enter__(self) -> Self:
        self.is_set = False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.is_set = True
        # A Python handler would run only after a long call into torch has returned. The default
        # action ends the process at once.
        signal.signal(number, signal.SIG_DFL)
