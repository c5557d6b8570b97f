"""Stop a training when the process is told to end, after the step that it is in."""

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

__all__ = [
    "LastStep",
    "RankTermination",
    "Termination",
]


@final
class Termination:
    """Within a ``with`` block, note the first SIGTERM; the second one ends the process at once.

    Signals can be handled in the main thread only; in any other the block changes nothing.
    """

    def __init__(self) -> None:
        self.is_requested = False
        """Whether the process has been told to end."""
        self._before: Any = None

    def __enter__(self) -> Self:
        self.is_requested = False
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
        self.is_requested = True
        # The second one must not wait for Python: a long call into torch may be running.
        signal.signal(number, signal.SIG_DFL)


_SECONDS_BETWEEN_LOOKS = 0.5
_trainings = itertools.count()


@final
class RankTermination:
    """Within a ``with`` block, let a SIGTERM at any rank name one last step for all of them.

    On one process that is the step during which the signal came. On several, no step costs a
    message: a thread of each rank asks ``torch.distributed``'s key-value store twice a second
    whether another rank was told to end, off the way of the training.
    """

    def __init__(self) -> None:
        self._signal = Termination()
        self._last_step: LastStep | None = None
        self.is_stopping = False
        """Whether the step that was asked about last is the last one; the same on all ranks."""

    def __enter__(self) -> Self:
        self.is_stopping = False
        if num_ranks() > 1:
            self._last_step = _last_step_of_all_ranks()
        self._signal.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._signal.__exit__(kind, error, traceback)
        if self._last_step is not None:
            self._last_step.close()
            self._last_step = None

    def stops_after(self, step: int) -> bool:
        """Return whether a step that has just been finished is the last one.

        To be called after each step, with numbers that count up and are the same on all ranks.
        """
        is_requested = self._signal.is_requested
        if self._last_step is None:
            self.is_stopping = is_requested
        else:
            self.is_stopping = self._last_step.is_reached(step, is_requested=is_requested)
        return self.is_stopping

    def conclude(self, device: torch.device) -> bool:
        """Return whether any rank was told to end until now; later signals are not handled.

        To be called by all ranks when the training has ended: they wait for each other.

        Args:
            device: One that the ranks can send from.
        """
        self._signal.__exit__(None, None, None)
        if self._last_step is None:
            return self._signal.is_requested
        # Another rank may be waiting to learn which step this one is in.
        self._last_step.close()
        return any_rank(flag=self._signal.is_requested, device=device)


def _last_step_of_all_ranks() -> "LastStep":
    # A connection of its own: on a shared one, a rank that waits would hold up everyone else.
    store: Any = distributed.distributed_c10d._get_default_store()  # noqa: SLF001  (no public way)
    names = f"mfwrap/termination/{next(_trainings)}/"
    return LastStep(store.clone(), names, this_rank(), num_ranks())


class KeyValueStore(Protocol):
    """What is asked of one of ``torch.distributed``'s stores, each of which has it."""

    def set(self, key: str, value: str, /) -> None:
        """Set a value."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys have values."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Return the values of keys; wait until they have some."""


@final
class LastStep:
    """Which step is the last one on all ranks, once any has asked for an end.

    A rank that is told to end asks for it in the store, and each rank answers, from a thread, with
    the number of the step that it has begun; it then begins no further one before it has read all
    answers. The largest is the last step: all ranks have begun it or are yet to, and none has gone
    past it.

    Args:
        store: Shared by the ranks.
        names: What begins the names of its keys that are used for this and nothing else.
        rank: This one.
        num_ranks: How many there are.
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
        """Return whether a finished step is the last one; if not, the next one has begun.

        Args:
            step: Its number.
            is_requested: Whether this rank was told to end.
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
        """Stop listening, and answer whoever asks later."""
        self._is_over.set()
        self._thread.join()
        # A store that is gone has no one waiting at it.
        with self._lock, contextlib.suppress(distributed.DistError):
            self._answer()

    def _answer(self) -> None:
        if not self._has_answered:
            self._store.set(self._own_answer, str(self._begun))
            self._has_answered = True

    def _listen(self) -> None:
        try:
            while not self._is_over.wait(_SECONDS_BETWEEN_LOOKS):
                if self._store.check([self._asked]):
                    with self._lock:
                        self._answer()
                    return
        except distributed.DistError as error:
            warnings.warn(
                f"a SIGTERM at another rank would not be noticed any more: {error}", stacklevel=2
            )
