"""Run a command in a terminal, and read what the terminal shows."""

import fcntl
import os
import pty
import struct
import subprocess
import sys
import termios
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

from mfwrap.cli import main
from support.programs import FORKING

__all__ = ["COLUMNS", "command_in_terminal", "screen", "written_in_terminal"]

COLUMNS = 100


def written_in_terminal(words: Sequence[str], folder: Path) -> str:
    """Return what a command writes to a terminal of 100 columns; it must succeed.

    Args:
        words: Program and arguments.
        folder: Working directory.
    """
    ours, theirs = _opened()
    environment = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES"}}
    with subprocess.Popen(
        words, cwd=folder, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        written = _read(ours)
    assert process.returncode == 0, written
    return written


def command_in_terminal(words: Sequence[str], folder: Path) -> str:
    """Return what `mfwrap` with arguments writes there, in a forked process, which starts at once.

    Args:
        words: Arguments.
        folder: Working directory.
    """
    ours, theirs = _opened()
    is_open, opened = FORKING.Pipe(duplex=False)
    arguments = (words, folder, os.ttyname(theirs), opened)
    process = FORKING.Process(target=_call, args=arguments)
    process.start()
    is_open.recv()
    os.close(theirs)
    written = _read(ours)
    process.join()
    assert process.exitcode == 0, written
    return written


def _call(words: Sequence[str], folder: Path, terminal: str, opened: Connection) -> None:
    for name in ("COLUMNS", "LINES"):
        os.environ.pop(name, None)
    os.chdir(folder)
    file = os.open(terminal, os.O_RDWR | os.O_NOCTTY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(n, "w", buffering=1, closefd=False) for n in (1, 2))
    opened.send(None)
    main(list(words))


def _opened() -> tuple[int, int]:
    """Open a terminal; return the end that reads it, and the end of a program."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    return ours, theirs


def _read(terminal: int) -> str:
    """Return all that is written to a terminal, and close it."""
    written = b""
    try:
        while part := os.read(terminal, 4096):
            written += part
    except OSError:  # on Linux, the end of a terminal is an error
        pass
    os.close(terminal)
    return written.decode()


def screen(written: str) -> list[str]:
    """Return the lines of a terminal after a text with carriage returns."""
    lines = []
    for line in written.replace("\x1b[A", "").split("\n"):
        parts = [part for part in line.split("\r") if part.strip()]
        lines.append(parts[-1].rstrip() if parts else "")
    return lines
