"""Crash `mfwrap train` at one of its file operations, resume it, and compare what it leaves."""

import errno
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from transformers.trainer_utils import get_last_checkpoint

from support.crash.contents import contents, differences
from support.crash.fork_server import ForkServer, Task
from support.crash.operations import FAILURES, Operation, inject, operations, trace_arguments
from support.crash.recipe import write_recipe, write_rows

__all__ = ["Crashes"]

_TRAIN = ("train", "crash.yaml")
_FAILED = "mfwrap: the run failed: "


class Crashes:
    """Run one command again and again, and crash each run at another operation.

    Args:
        server: Server that runs the processes.
        folder: Empty folder for the runs.
        settings: Options of ``mfwrap train`` for the command and for resuming it.
        resume: Further options of the command.
        begin: Function that fills the current folder of a run before the command runs; ``None``
            starts without a run folder.
    """

    def __init__(
        self,
        server: ForkServer,
        folder: Path,
        settings: tuple[str, ...] = (),
        resume: tuple[str, ...] = (),
        begin: Callable[[Path], None] | None = None,
    ) -> None:
        self._server, self._folder, self._begin = server, folder, begin
        self._command = (*_TRAIN, *settings, *resume)
        self._resume = (*_TRAIN, *settings, "--resume")
        if not (folder / "rows").exists():
            write_rows(folder)

    @functools.cached_property
    def _expected(self) -> dict[str, Any]:
        return contents(self.finished("alone") / "run")

    @functools.cached_property
    def operations(self) -> list[Operation]:
        """All file operations of the command in the run folder."""
        expected = self._expected  # the first run creates files that later ones only read
        folder = self.finished("traced", "")
        assert differences(expected, contents(folder / "run")) == []
        return self._trace(folder)

    def finished(self, name: str, injection: str | None = None) -> Path:
        """Return a new folder in which the command has run to its end."""
        folder = self.new(name)
        assert self.run(folder, injection=injection) == 0, self.output(folder)
        return folder

    def run(
        self, folder: Path, command: tuple[str, ...] | None = None, injection: str | None = None
    ) -> int:
        """Run a command in a folder; return its exit status, or minus the signal that ended it.

        Args:
            folder: Current folder of the command.
            command: Arguments of ``mfwrap``; ``None`` for the command of the constructor.
            injection: What strace does to the system calls; ``""`` traces them only, ``None`` runs
                without strace.
        """
        strace = () if injection is None else trace_arguments(folder / "trace.txt", injection)
        task = Task(
            program="support.crash.loops:command_line",
            arguments=self._command if command is None else command,
            folder=str(folder),
            strace=strace,
        )
        return self._server.run(task)[0].status

    def output(self, folder: Path) -> str:
        """Return what the last command in a folder has printed."""
        return (folder / "output_0.txt").read_text(encoding="utf-8")

    def kill_points(self) -> Iterator[Operation]:
        """Yield the operations before which the files differ from those before the last point."""
        has_changed = True
        for operation in self.operations:
            if has_changed:
                yield operation
            has_changed = operation.changes_files

    def faults_of_kill(self, operation: Operation) -> list[str]:
        """Kill the command just before an operation and resume it; return what is wrong then."""
        folder = self.new("killed")
        status = self.run(folder, injection=inject(operation, "signal=KILL"))
        self._check_crashed_at(folder, operation)
        assert status < 0, self.output(folder)
        return self._faults_of_resume(folder)

    def faults_of_failure(self, operation: Operation) -> list[str]:
        """Make an operation fail and resume the command; return what is wrong then.

        The command may ignore the failure, for example of deleting a temporary file. If it does
        not, it must print one line with the name of the file and the reason.
        """
        folder, name = self.new("failed"), FAILURES[operation.call]
        status = self.run(folder, injection=inject(operation, f"error={name}"))
        self._check_crashed_at(folder, operation)
        faults = []
        if status != 0:
            lines = self.output(folder).splitlines()
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
        return faults + self._faults_of_resume(folder)

    def _faults_of_resume(self, folder: Path) -> list[str]:
        """Resume, or start again if there is no checkpoint yet, until the run has ended."""
        run = folder / "run"
        has_checkpoint = run.is_dir() and get_last_checkpoint(str(run)) is not None
        status = self.run(folder, self._resume if has_checkpoint else self._command)
        if status != 0:
            return [f"cannot be resumed: {self.output(folder)[-2000:]}"]
        return differences(self._expected, contents(run))

    def _check_crashed_at(self, folder: Path, operation: Operation) -> None:
        """Check that a run did the same operations as the traced run before it was crashed."""
        number = self.operations.index(operation)
        planned = [each.identity() for each in self.operations[: number + 1]]
        done = [each.identity() for each in self._trace(folder)[: number + 1]]
        assert done == planned, f"crashed at {done[-1]} instead of {operation}"

    def _trace(self, folder: Path) -> list[Operation]:
        return operations(folder / "trace.txt", folder / "run")

    def new(self, name: str) -> Path:
        """Return a new folder in which the command can run."""
        folder = self._folder / name
        shutil.rmtree(folder, ignore_errors=True)
        write_recipe(folder)
        if self._begin is not None:
            self._begin(folder)
        return folder
