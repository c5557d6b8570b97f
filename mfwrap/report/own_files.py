"""Recognize the pages and pictures of runs that mfwrap has written, by what is in the files.

A folder of a stock Trainer has no list of files, and a page of several runs is in any folder. So
the file itself tells who has written it.
"""

from pathlib import Path

WRITER = "mfwrap"
"""The ``generator`` of a page, and the ``Software`` of a picture."""

_LENGTH_OF_START = 1024


def is_own_page(path: Path) -> bool:
    """Return whether a file is the page of runs."""
    start = _start_of(path)
    generator = f'<meta name="generator" content="{WRITER}">'.encode()
    return start.startswith(b"<!doctype html>") and generator in start


def is_own_picture(path: Path) -> bool:
    """Return whether a file is the picture of a run."""
    start = _start_of(path)
    return start.startswith(b"\x89PNG\r\n\x1a\n") and b"tEXtSoftware\0" + WRITER.encode() in start


def _start_of(path: Path) -> bytes:
    """Return the first bytes of a file; none of a link, a folder, or a file that is unreadable."""
    if path.is_symlink() or not path.is_file():
        return b""
    try:
        with path.open("rb") as file:
            return file.read(_LENGTH_OF_START)
    except OSError:
        return b""
