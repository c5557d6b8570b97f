"""Crash `mfwrap train` at one of its file operations, resume it, and compare what it leaves."""

import errno
import functools
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from support.crash.contents import contents, differences
from support.crash.fork_server import ForkServer, Task
from support.crash.operations import (
    FAILURES,
    Operation,
    inject_nth,
    inject_on_path,
    operations,
    trace_arguments,
    written_in_place,
)
from support.crash.recipe import write_recipe, write_rows

__all__ = ["Crashes"]

_TRAIN = ("train", "crash.yaml")
_FAILED = "mfwrap: the run failed: "


class Crashes:
    """Run one command again and again, and crash each run at another operation.

    A command on several ranks is crashed on one of them, and the others are killed as soon as it
    has ended.

    Args:
        server: Server that runs the processes.
        folder: Empty folder for the runs.
        settings: Options of ``mfwrap train`` for the command and for resuming it.
        further: Further options of the command.
        begin: Function that fills the current folder of a run before the command runs; ``None``
            starts without a run folder.
        num_ranks: Number of processes of the command.
        rank: Rank that is traced and crashed.
        in_background: Whether a second thread writes the checkpoints.
    """

    def __init__(
        self,
        server: ForkServer,
        folder: Path,
        *,
        settings: tuple[str, ...] = (),
        further: tuple[str, ...] = (),
        begin: Callable[[Path], None] | None = None,
        num_ranks: int = 1,
        rank: int = 0,
        in_background: bool = False,
    ) -> None:
        self._server, self._folder, self._begin = server, folder, begin
        self._num_ranks, self._rank = num_ranks, rank
        self._in_background = in_background
        self._counts_on_paths = num_ranks > 1 or in_background
        settings += ("--set", "async_save=true") if in_background else ()
        self.command = (*_TRAIN, *settings, *further)
        self._resume = (*_TRAIN, *settings, "--resume")
        if not (folder / "rows").exists():
            write_rows(folder)

    @functools.cached_property
    def _alone(self) -> Path:
        return self.finished("alone") / "run"

    @functools.cached_property
    def expected(self) -> dict[str, Any]:
        """Contents of the run folder after the command has run to its end."""
        return contents(self._alone)

    @functools.cached_property
    def names(self) -> set[str]:
        """Names of all files and folders after the command has run to its end."""
        return {path.relative_to(self._alone).as_posix() for path in self._alone.rglob("*")}

    @functools.cached_property
    def operations(self) -> list[Operation]:
        """All file operations of the command in the run folder."""
        expected = self.expected  # the first run creates files that later ones only read
        folder = self.finished("traced", trace_arguments)
        assert differences(expected, contents(folder / "run")) == []
        return self.trace(folder)

    def finished(self, name: str, strace: Callable[[Path], tuple[str, ...]] | None = None) -> Path:
        """Return a new folder in which the command has run to its end."""
        folder = self.new(name)
        assert self.run(folder, strace=strace) == 0, self.output(folder)
        return folder

    def crashed(self, name: str, operation: Operation, effect: str) -> tuple[Path, int]:
        """Crash the command at an operation; return its current folder and its status.

        Args:
            name: Name of the new folder.
            operation: One of `operations`.
            effect: ``signal=...`` or ``error=...``.
        """
        folder = self.new(name)
        inject = inject_on_path if self._counts_on_paths else inject_nth
        status = self.run(folder, strace=functools.partial(inject, operation, effect))
        self._check_crashed_at(folder, operation)
        return folder, status

    def run(
        self,
        folder: Path,
        command: tuple[str, ...] | None = None,
        strace: Callable[[Path], tuple[str, ...]] | None = None,
    ) -> int:
        """Run a command in a folder; return its exit status, or minus the signal that ended it.

        Args:
            folder: Current folder of the command.
            command: Arguments of ``mfwrap``; ``None`` for the command of the constructor.
            strace: Returns the arguments of strace for the current folder; ``None`` runs without
                strace.
        """
        task = Task(
            program="support.crash.loops:command_line",
            arguments=self.command if command is None else command,
            folder=str(folder),
            num_ranks=self._num_ranks,
            rank=self._rank,
            strace=() if strace is None else strace(folder),
        )
        ended = self._server.run(task)
        # The others were killed if this rank has crashed.
        own = ended[self._rank].status
        return own or next((each.status for each in ended if each.status), 0)

    def output(self, folder: Path) -> str:
        """Return what the last command in a folder has printed."""
        return (folder / f"output_{self._rank}.txt").read_text(encoding="utf-8")

    def _last_words(self, folder: Path) -> list[str]:
        """Return the lines of a rank that said why it has failed, of the crashed one if it did.

        All ranks may raise an error together. The first one that ends has the others killed.
        """
        files = [folder / f"output_{rank}.txt" for rank in range(self._num_ranks)]
        said = [file.read_text(encoding="utf-8").splitlines() for file in files]
        order = [said[self._rank], *said]
        failed = (lines for lines in order if lines and lines[-1].startswith(_FAILED))
        return next(failed, order[0])

    def faults_of_kill(self, operation: Operation) -> list[str]:
        """Kill the command just before an operation, resume it, and return what is wrong."""
        folder, status = self.crashed("killed", operation, "signal=KILL")
        assert status < 0, self.output(folder)
        return self._faults_of_resume(folder)

    def faults_of_failure(self, operation: Operation) -> list[str]:
        """Make an operation fail, resume the command, and return what is wrong.

        The command may ignore the failure, for example of deleting a temporary file. If it does
        not, it must print one line with the name of the file and the reason.
        """
        name = FAILURES[operation.call]
        folder, status = self.crashed("failed", operation, f"error={name}")
        faults = []
        if status != 0:
            lines = self._last_words(folder)
            # torch does not say why it cannot write.
            reasons = [os.strerror(getattr(errno, name)), "torch.save failed"]
            said = lines[-1] if lines else ""
            if not said.startswith(_FAILED):
                faults.append(f"must end with {_FAILED}...: {said}")
            faults += [
                f"must name one of {names}: {said}"
                for names in (reasons, operation.names())
                if not any(each in said for each in names)
            ]
            faults += [f"prints {line}" for line in lines if line.startswith("Traceback")]
        # The run may have written a file about its error.
        in_place = written_in_place(self.trace(folder))
        faults += [f"is written where readers see it: {line}" for line in in_place]
        return faults + self._faults_of_resume(folder)

    def _faults_of_resume(self, folder: Path) -> list[str]:
        """Resume, or start again if there is no checkpoint yet, until the run has ended."""
        run = folder / "run"
        # Checkpoints that are to be overwritten belong to another run.
        has_checkpoint = not self._overwrites and run.is_dir() and get_last_checkpoint(str(run))
        status = self.run(folder, self._resume if has_checkpoint else self.command)
        if status != 0:
            return [f"cannot be resumed: {self.output(folder)[-2000:]}"]
        return differences(self.expected, contents(run)) + self._old_files(run)

    def _old_files(self, run: Path) -> list[str]:
        """Return a line for each file that is left of the run that was to be overwritten."""
        if not self._overwrites:
            return []
        found = {path.relative_to(run).as_posix() for path in run.rglob("*")}
        return [f"{name}: must have been deleted" for name in sorted(found - self.names)]

    @property
    def _overwrites(self) -> bool:
        return "--overwrite" in self.command

    def _check_crashed_at(self, folder: Path, operation: Operation) -> None:
        """Check that a run did the same operations as the traced run before it was crashed."""
        done = [each.identity() for each in self.trace(folder)]
        if self._counts_on_paths:
            planned = [operation.identity_on_path()]
            # A run goes on after a failure. If it was killed, this is its last operation.
            done = [each for each in done if each == planned[0]][:1]
        else:
            number = self.operations.index(operation) + 1
            planned = [each.identity() for each in self.operations[:number]]
            done = done[:number]
        assert done == planned, f"crashed at {done[-1:]} instead of {operation}"

    def trace(self, folder: Path) -> list[Operation]:
        """Return the operations of the last traced command in a folder."""
        return operations(folder / "trace.txt", folder / "run", by_threads=self._in_background)

    def new(self, name: str) -> Path:
        """Return a new folder in which the command can run."""
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        write_recipe(folder)
        if self._begin is not None:
            self._begin(folder)
        return folder
