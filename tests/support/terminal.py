"""Run a command in a terminal, and read what the terminal shows."""

import fcntl
import os
import pty
import struct
import subprocess
import termios
from collections.abc import Sequence
from pathlib import Path

__all__ = ["COLUMNS", "screen", "written_in_terminal"]

COLUMNS = 100


def written_in_terminal(words: Sequence[str], folder: Path) -> str:
    """Return what a command writes to a terminal of 100 columns; it must succeed.

    Args:
        words: Program and arguments.
        folder: Working directory.
    """
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in {"COLUMNS", "LINES"}}
    with subprocess.Popen(
        words, cwd=folder, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        written = b""
        try:
            while part := os.read(ours, 4096):
                written += part
        except OSError:  # on Linux, the end of a terminal is an error
            pass
        os.close(ours)
    assert process.returncode == 0, written.decode()
    return written.decode()


def screen(written: str) -> list[str]:
    """Return the lines of a terminal after a text with carriage returns."""
    lines = []
    for line in written.replace("\x1b[A", "").split("\n"):
        parts = [part for part in line.split("\r") if part.strip()]
        lines.append(parts[-1].rstrip() if parts else "")
    return lines
