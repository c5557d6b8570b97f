"""Programs in processes of their own, forked from a process that has imported mfwrap.

``python -c`` imports torch and mfwrap for seconds before the first line of a program runs. A forked
process has them. What a test says about the start itself, about the end by an exception, or about
the environment needs a process that is not forked.
"""

import multiprocessing
import os
import sys
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Self

__all__ = ["FORKING", "Program"]

FORKING = multiprocessing.get_context("forkserver")
"""Starts processes. There is one server in each process of pytest, which imports these modules."""

FORKING.set_forkserver_preload(["mfwrap.trainer", "mfwrap.accelerate", "mfwrap.callbacks"])


class Program:
    """A program that runs beside the test. A ``with`` block closes its stdin, and waits for it.

    Args:
        code: Python code.
        words: Arguments, which the code finds in ``sys.argv[1:]``.
        may_start_others: Whether the program may start processes by ``multiprocessing``. It must
            then end by itself where stdin is closed.
    """

    def __init__(self, code: str, *words: object, may_start_others: bool = False) -> None:
        stdin, ours_in = FORKING.Pipe(duplex=False)
        ours_out, stdout = FORKING.Pipe(duplex=False)
        arguments = (code, [str(word) for word in words], stdin, stdout)
        self._process = FORKING.Process(target=_run, args=arguments, daemon=not may_start_others)
        self._process.start()
        self.stdin = os.fdopen(os.dup(ours_in.fileno()), "w")
        self.stdout = os.fdopen(os.dup(ours_out.fileno()))
        for end in (stdin, stdout, ours_in, ours_out):
            end.close()

    @property
    def pid(self) -> int | None:
        """Number of the process."""
        return self._process.pid

    def kill(self) -> None:
        """Kill the process, and wait until it has ended."""
        self._process.kill()
        self._process.join()

    def wait(self) -> int | None:
        """Wait for the end, and return the exit status."""
        self._process.join()
        return self._process.exitcode

    def end(self) -> str:
        """Close stdin, wait for the end, and return what is left in stdout.

        Raises:
            RuntimeError: If the program ends with an exception or by a signal.
        """
        self.stdin.close()
        with self.stdout:
            left = self.stdout.read()
        self._process.join()
        if self._process.exitcode != 0:
            msg = f"the program ended with status {self._process.exitcode}"
            raise RuntimeError(msg)
        return left

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.stdout.closed and self._process.exitcode in {None, 0}:
            self.end()
        self.stdin.close()
        self.stdout.close()


def _run(code: str, words: Sequence[str], stdin: Connection, stdout: Connection) -> None:
    os.dup2(stdin.fileno(), 0)
    os.dup2(stdout.fileno(), 1)
    stdin.close()
    stdout.close()
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.argv = ["-c", *words]
    exec(compile(code, "-c", "exec"), {"__name__": "__main__"})  # noqa: S102  (code of a test)
