"""Ask a running training for a checkpoint, through a file in its run folder.

A training that takes requests writes the file ``_mfwrap_ready``. A request renames this file to
``_mfwrap_request``, so it can only be made while a training takes requests. When the checkpoint is
in place, the training renames the file back; its text is then the path of the checkpoint.

The names contain the token of the process that owns the folder, so a request reaches only the
training that it was made for. They end like the names of temporary files, so the next owner of the
folder deletes what a killed training has left there
(`mfwrap.checkpoints.run_folders.remove_leftovers`).
"""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self, final

from mfwrap.checkpoints.locks import (
    PARTIAL,
    RUN_LOCK,
    owner_token,
    process_token,
    remove_dead_lock,
)
from mfwrap.collectives import num_ranks, this_rank
from mfwrap.collectives.store import new_connection
from mfwrap.compatibility.torch import default_store
from mfwrap.records.own_names import own_names
from mfwrap.termination import LastStep

_SECONDS_BETWEEN_LOOKS = 1.0
"""Time between two looks of a training for a request. A look at a network disk takes some time."""

_SECONDS_BETWEEN_ANSWERS = 0.2


class _Files(NamedTuple):
    ready: Path
    request: Path


def _files(folder: Path, token: str) -> _Files:
    end = f".{token.partition('-')[0]}{PARTIAL}"
    return _Files(folder / f"_mfwrap_ready{end}", folder / f"_mfwrap_request{end}")


def request_checkpoint(folder: Path) -> str:
    """Ask the training that runs in a run folder for a checkpoint at its next step.

    Args:
        folder: Run folder, on this machine or on a disk that it shares with the training.

    Returns:
        Token of the training, for `wait_for_checkpoint`.

    Raises:
        ValueError: If the folder is not a run folder, if no training runs in it, if the training
            takes no requests, or if this user must not write to the folder.
    """
    token = _token_of_training(folder)
    if token is None:
        is_run = folder.is_dir() and own_names(folder)
        msg = f"no training runs in {folder}" if is_run else f"{folder} is not a run folder"
        raise ValueError(msg)
    files = _files(folder, token)
    try:
        files.ready.replace(files.request)
    except FileNotFoundError:
        if not files.request.exists():
            msg = (
                f"the program that writes {folder} takes no requests for checkpoints: a Trainer "
                "takes them until its last step, a loop if it reads `LoopMonitor.should_save`"
            )
            raise ValueError(msg) from None
    except OSError as error:
        msg = f"cannot place a request in {folder}: {error.strerror}"
        raise ValueError(msg) from error
    return token


def wait_for_checkpoint(folder: Path, token: str) -> Path:
    """Wait until the checkpoint that was asked for is complete, and return its path.

    Args:
        folder: Run folder.
        token: Result of `request_checkpoint`.

    Returns:
        Path of the checkpoint; `folder` if only the loop knows it, because it saves without
        ``accelerator.save_state``.

    Raises:
        ValueError: If the training ends before it has said that the checkpoint is complete.
    """
    files = _files(folder, token)
    while files.request.exists() and _token_of_training(folder) == token:
        time.sleep(_SECONDS_BETWEEN_ANSWERS)
    try:
        return Path(os.path.normpath(folder / files.ready.read_text("utf-8")))
    except FileNotFoundError:
        msg = (
            f"the training in {folder} ended before it said that the checkpoint is complete; list "
            f"its checkpoints with: mfwrap verify {folder}"
        )
        raise ValueError(msg) from None


def _token_of_training(folder: Path) -> str | None:
    """Return the token of the living owner of a run folder; ``None`` without one."""
    remove_dead_lock(folder / RUN_LOCK)
    return owner_token(folder / RUN_LOCK)


@final
class CheckpointRequests:
    """Take requests for checkpoints in a training, and answer them.

    Rank 0 looks for the file, at most once a second. All ranks agree on the step as they agree on
    the last step after a signal (`mfwrap.termination.LastStep`): until a request comes, a step
    neither communicates nor blocks for this purpose.

    Args:
        clock: Returns seconds from an arbitrary start.
    """

    _count: ClassVar[Iterator[int]] = itertools.count()
    """Numbers of the trainings of this process, which begin on all ranks in the same order."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.is_open = False
        """Whether requests are taken."""
        self._folder = Path()
        self._files: _Files | None = None
        self._next_look = 0.0
        self._connection: Any = None
        self._names: Iterator[str] = iter(())
        self._agreed: LastStep | None = None
        self._step = -1
        self._is_due = False
        self._awaited: Path | None = None

    def open(self, folder: Path) -> Self:
        """Begin to take requests. Call it on all ranks, when rank 0 owns the run folder."""
        self.is_open, self._folder, self._step = True, folder, -1
        number = next(self._count)
        self._names = (f"{number}/{each}/" for each in itertools.count())
        if num_ranks() > 1:
            self._connection = new_connection(default_store(), "mfwrap/checkpoint_requests")
        if this_rank() == 0:
            files = _files(folder, process_token())
            # A training does not end because it cannot take requests.
            with contextlib.suppress(OSError):
                files.ready.touch()
                self._files = files
        return self

    def close(self) -> None:
        """Take no more requests, and delete the file. Call it on all ranks."""
        self._answer()
        self.is_open = self._is_due = False
        if self._agreed is not None:
            self._agreed.close()
        files, self._files = self._files, None
        self._agreed = self._connection = self._awaited = None
        for file in files or ():
            with contextlib.suppress(OSError):
                file.unlink()

    def is_due(self, step: int) -> bool:
        """Return whether all ranks must save now. Call it after each step, on all ranks.

        It stays true at this step until `saved` is called. If `saved` is not called before the next
        step, the request is taken again.

        Args:
            step: Number of the finished step, the same on all ranks.

        Raises:
            RuntimeError: If a rank does not answer after a request, see
                `mfwrap.termination.LastStep`.
        """
        if not self.is_open or step == self._step:
            return self._is_due
        goes_back, self._step = step < self._step, step
        self._is_due = self._sees_request()
        if self._connection is not None:
            if self._agreed is None or goes_back:
                self._agreed = self._next_agreement()
            self._is_due = self._agreed.is_reached(step, is_requested=self._is_due)
            if self._is_due:
                self._agreed = self._next_agreement()
        return self._is_due

    def saved(self, checkpoint: Path) -> None:
        """Answer the request if `is_due` was true, as soon as the checkpoint is complete.

        Args:
            checkpoint: Path that the checkpoint has, or gets when it is complete; a relative path
                begins at the run folder.
        """
        if self._is_due:
            self._is_due, self._awaited = False, self._folder / checkpoint
        self._answer()

    def _next_agreement(self) -> LastStep:
        if self._agreed is not None:
            self._agreed.close()
        return LastStep(
            self._connection,
            next(self._names),
            this_rank(),
            num_ranks(),
            reason="training was asked to save",
        )

    def _sees_request(self) -> bool:
        if self._files is None or self._clock() < self._next_look:
            return False
        self._next_look = self._clock() + _SECONDS_BETWEEN_LOOKS
        if self._awaited is not None:
            self._answer()
            return False
        return self._files.request.exists()

    def _answer(self) -> None:
        """Rename the file back if the checkpoint is complete: it gets its name last."""
        if self._files is None or self._awaited is None or not self._awaited.exists():
            return
        with contextlib.suppress(OSError):  # of a full disk: the answer is then the folder
            self._files.request.write_text(os.path.relpath(self._awaited, self._folder), "utf-8")
        try:
            self._files.request.replace(self._files.ready)
        except OSError:
            self._files = None  # else the request would be taken again and again
        self._awaited = None

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        # A pickled trainer takes its own requests. Threads cannot be pickled.
        return type(self), ()
