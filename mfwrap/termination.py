"""Stop a training on SIGTERM, SIGUSR1 or Ctrl-C after a step that all ranks finish."""

import contextlib
import ctypes
import itertools
import os
import queue
import re
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Never, Self, final

import torch
from torch import distributed
from torch.distributed.distributed_c10d import Store

from mfwrap.collectives import any_rank, num_ranks, this_rank
from mfwrap.collectives.places import named_ranks
from mfwrap.collectives.store import has_keys, new_connection
from mfwrap.compatibility.torch import default_store

EXIT_STOPPED = 75
"""Exit code of a training that a signal has stopped: ``EX_TEMPFAIL``, "try again later"."""

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
"""Signals that stop a training. Slurm can send SIGUSR1 some time before the time limit of a job.
Windows has no SIGUSR1."""

_SECONDS_BETWEEN_CHECKS = 0.5
_SECONDS_FOR_ANSWERS = 10.0
"""Time after which a rank that has not answered counts as dead. torchrun kills the remaining ranks
30 seconds after it has asked them to stop."""

_SECONDS_OF_COPIES = 5.0
"""Time in which the same signal counts as a copy of the first one. Slurm sends a signal to every
process of a job step, and the step's torchrun passes it on to its workers, which get it twice."""

_set_c_handler = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p)(
    ("PyOS_setsig", ctypes.pythonapi)
)
"""Set the action of a signal from any thread; `signal.signal` works only in the main thread."""

_trainings = itertools.count()


@final
class RankTermination:
    """Stop all ranks after the same step if any rank receives a signal within a ``with`` block.

    The signals are SIGTERM, SIGUSR1 and SIGINT (Ctrl-C).

    With one process, the last step is the step during which the signal arrives; a save belongs to
    the step before it. With several processes, a thread of each rank checks the key-value store of
    ``torch.distributed`` twice a second for a signal at another rank. So until a signal arrives,
    the training steps neither communicate nor block for this purpose.
    """

    def __init__(self) -> None:
        self._flag = StopFlag()
        self._last_step: LastStep | None = None
        self.is_stopping = False
        """Last result of `stops_after`: whether training must stop; the same on all ranks."""
        self.is_interrupted = False
        """After `conclude`: whether only SIGINT has stopped training; the same on all ranks."""

    def __enter__(self) -> Self:
        self.is_stopping = False
        if num_ranks() > 1:
            connection = new_connection(default_store(), "mfwrap/termination")
            # In a fake process group, no other rank answers.
            if connection is not None:
                names = f"{next(_trainings)}/"
                self._last_step = LastStep(connection, names, this_rank(), num_ranks())
        self._flag.__enter__()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._flag.__exit__(kind, error, traceback)
        if self._last_step is not None:
            self._last_step.close()
            self._last_step = None

    def stops_after(self, step: int) -> bool:
        """Return whether training must stop after the step that was just finished.

        Call it after each step, on all ranks. Step numbers must increase by one, and must be the
        same on all ranks.

        Raises:
            RuntimeError: If a rank does not answer after a signal. Its process has probably ended:
                a launcher sends SIGTERM to the remaining ranks when one rank has failed.
        """
        is_requested = self._flag.is_set
        if self._last_step is None:
            self.is_stopping = is_requested
        else:
            self.is_stopping = self._last_step.is_reached(step, is_requested=is_requested)
        return self.is_stopping

    def stops_after_save(self) -> bool:
        """Return whether training must stop now that a checkpoint of the last step is written.

        With one process, this includes a signal that has come since `stops_after`. With several
        processes, other ranks may have begun the next step, so the ranks stop after that step.
        """
        if self._last_step is None:
            self.is_stopping = self._flag.is_set
        return self.is_stopping

    def conclude(self, device: torch.device) -> bool:
        """Stop handling the signals, and return whether any rank has received one.

        Call it on all ranks when the training has ended. The ranks wait for each other.

        Args:
            device: Device that the process group's backend can send from (a GPU for NCCL).
        """
        self._flag.__exit__(None, None, None)
        is_stopped, is_terminated = self._flag.is_set, self._flag.is_terminated
        if self._last_step is not None:
            # Answer first: another rank may be waiting to learn which step this rank has begun.
            self._last_step.close()
            is_stopped = any_rank(flag=is_stopped, device=device)
            is_terminated = is_stopped and any_rank(flag=is_terminated, device=device)
        self.is_interrupted = is_stopped and not is_terminated
        return is_stopped


@final
class LastStep:
    """Let all ranks agree on the last step after any rank has received a signal.

    1. The rank that received the signal sets the key ``asked`` in the store.
    2. A thread of each rank sees that key and answers with the number of the step that its rank
       has begun.
    3. A rank that has answered reads all answers before it begins another step.
    4. The largest answer is the last step. A rank's answer is never smaller than a step it has
       begun, so no rank is past the last step. Ranks with smaller answers continue up to and
       including the last step.

    Args:
        store: Key-value store that the ranks share.
        names: Prefix of the keys. Nothing else may use keys with this prefix.
        rank: This rank.
        num_ranks: Number of ranks.
        reason: What has happened when a rank is asked, for the error.
        seconds_between_checks: Time between two looks of the thread for a question.
    """

    def __init__(
        self,
        store: Store,
        names: str,
        rank: int,
        num_ranks: int,
        *,
        reason: str = "training was asked to stop",
        seconds_between_checks: float = _SECONDS_BETWEEN_CHECKS,
    ) -> None:
        self._store = store
        self._reason = reason
        self._seconds_between_checks = seconds_between_checks
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
        """Return whether a finished step is the last one; otherwise mark the next step as begun.

        Args:
            step: Number of the finished step.
            is_requested: Whether this rank has received a signal.

        Raises:
            RuntimeError: If a rank has not answered in time, or the process that hosts the store
                has ended.
        """
        with self._lock:
            if is_requested and not self._has_answered:
                self._begun = step
                with self._naming_the_dead():
                    self._store.set(self._asked, "")
                    self._answer()
            if not self._has_answered:
                self._begun = step + 1
                return False
        if self._number is None:
            with self._naming_the_dead():
                self._number = self._largest_answer()
        return step >= self._number

    def _largest_answer(self) -> int:
        if not has_keys(self._store, self._answers, _SECONDS_FOR_ANSWERS):
            silent = [r for r, key in enumerate(self._answers) if not self._store.check([key])]
            if silent:
                seconds = f"{_SECONDS_FOR_ANSWERS:.0f} s"
                who = f"{named_ranks(silent)} did not answer within {seconds} and has"
                raise self._dead(who)
        return max(int(answer) for answer in self._store.multi_get(self._answers))

    def close(self) -> None:
        """Stop the thread, and write this rank's answer so that no other rank waits for it."""
        self._is_over.set()
        self._thread.join()
        # If the store is gone, no rank can be waiting for this answer.
        with self._lock, contextlib.suppress(distributed.DistError):
            self._answer()

    def _answer(self) -> None:
        if not self._has_answered:
            self._store.set(self._own_answer, str(self._begun))
            self._has_answered = True

    def _listen(self) -> None:
        try:
            while not self._is_over.wait(self._seconds_between_checks):
                if self._store.check([self._asked]):
                    with self._lock:
                        self._answer()
                    return
        except distributed.DistError as error:
            warnings.warn(
                "lost the connection to the key-value store of torch.distributed, so a signal at "
                f"another rank will not be noticed: {error}",
                stacklevel=2,
            )

    @contextlib.contextmanager
    def _naming_the_dead(self) -> Iterator[None]:
        """Explain an error of the store, whose host has died."""
        try:
            yield
        except distributed.DistError as error:
            who = (
                "the process that hosts the key-value store of torch.distributed did not answer "
                "and has"
            )
            raise self._dead(who) from error

    def _dead(self, who: str) -> RuntimeError:
        return RuntimeError(
            f"{self._reason}, but {who} probably died; this rank ends without saving, so resume "
            "from the last checkpoint"
        )


@final
class StopFlag:
    """Within a ``with`` block, record SIGTERM, SIGUSR1 and SIGINT; a repeated one ends the process.

    SIGTERM or SIGUSR1 that is repeated within 5 seconds is ignored, because it may be a copy from a
    launcher. A second SIGINT raises ``KeyboardInterrupt`` at once; under torchrun or on several
    ranks, where it may be a copy, too, only after 5 seconds.

    Python handles signals only in the main thread. In any other thread the block does nothing.
    SIGUSR1 and SIGINT are left alone if other code handles them.
    """

    def __init__(self) -> None:
        self.is_set = False
        """Whether the process has received a signal in the current or last block."""
        self.is_terminated = False
        """Whether any of these signals was SIGTERM or SIGUSR1."""
        self._interrupted_at: float | None = None
        self._received: set[int] = set()
        self._before: dict[int, Any] = {}
        # A `SimpleQueue` may be filled by a signal handler, whatever the main thread is doing.
        self._to_restore: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.is_set = self.is_terminated = False
        self._interrupted_at = None
        self._received.clear()
        if threading.current_thread() is threading.main_thread():
            self._is_over.clear()
            # A signal may have come after the thread of the last block had ended.
            self._to_restore = queue.SimpleQueue()
            self._thread = threading.Thread(
                target=self._restore, name="mfwrap-signals", daemon=True
            )
            self._thread.start()
            for number in _SIGNALS:
                if number == signal.SIGTERM or is_free(number):
                    self._before[number] = signal.signal(number, self._receive)
            if is_free(signal.SIGINT):
                self._before[signal.SIGINT] = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._thread is not None:
            self._is_over.set()
            self._to_restore.put(None)
            self._thread.join()
            self._thread = None
        while self._before:
            number, before = self._before.popitem()
            # Leave a handler that other code has set meanwhile: transformers' callback for
            # `enable_jit_checkpoint` removes its own handler when a training ends, which must not
            # be put back.
            ours: Any = signal.SIG_IGN if number in self._received else self._receive
            if number == signal.SIGINT:
                ours = self._interrupt
            if signal.getsignal(number) == ours:
                signal.signal(number, before)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.is_set = self.is_terminated = True
        self._received.add(number)
        # Ignore copies; afterwards `_restore` sets the default action, which ends the process at
        # once. A Python handler would run only after the current call into torch has returned.
        signal.signal(number, signal.SIG_IGN)
        self._to_restore.put(number)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        now, first = time.monotonic(), self._interrupted_at
        if first is None:
            self.is_set, self._interrupted_at = True, now
        elif not _may_be_copied() or now - first > _SECONDS_OF_COPIES:
            signal.default_int_handler(number, frame)

    def _restore(self) -> None:
        while (number := self._to_restore.get()) is not None:
            is_over = self._is_over.wait(_SECONDS_OF_COPIES)
            # Leave a handler that other code has set meanwhile.
            if not is_over and signal.getsignal(number) == signal.SIG_IGN:
                _set_c_handler(number, None)

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        # A pickled trainer has a flag of its own. Queues and locks cannot be pickled.
        return type(self), ()


def _may_be_copied() -> bool:
    """Return whether a launcher may pass a Ctrl-C on that the process has got itself."""
    return num_ranks() > 1 or "TORCHELASTIC_RUN_ID" in os.environ


def is_free(number: int) -> bool:
    """Return whether no code but this module handles a signal.

    A handler in C, such as that of ``faulthandler.register``, is found on Linux only.
    """
    handler = signal.getsignal(number)
    if number == signal.SIGINT and handler == signal.default_int_handler:
        return True
    if handler == signal.SIG_DFL:
        return not _is_caught(number)
    return handler == _exit or isinstance(getattr(handler, "__self__", None), StopFlag)


def _is_caught(number: int) -> bool:
    """Return whether the process has a handler for a signal, as far as Linux tells."""
    try:
        status = Path("/proc/self/status").read_text(encoding="utf-8")
    except OSError:
        return False
    caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status, re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


@contextlib.contextmanager
def exiting_when_stopped() -> Iterator[None]:
    """Within the block, exit with `EXIT_STOPPED` at a signal that arrives outside of a training.

    A training within the block stops after its step and saves first; see `RankTermination`. Ctrl-C
    outside of a training raises ``KeyboardInterrupt``, as usual.
    """
    before = {
        number: signal.getsignal(number)
        for number in _SIGNALS
        if number == signal.SIGTERM or is_free(number)
    }
    for number in before:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _exit(number: int, frame: FrameType | None) -> Never:
    del number, frame
    raise SystemExit(EXIT_STOPPED)
