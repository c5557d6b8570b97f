"""Recognize the pages and pictures of runs that mfwrap has written, by what is in the files.

A folder of a stock Trainer has no list of files, and a page of several runs is in any folder. So
the file itself tells who has written it.
"""

import struct
from pathlib import Path

WRITER = "mfwrap"
"""The ``generator`` of a page, and the ``Software`` of a picture."""

_OLDER_PAGES = (b'<script id="panels" type="application/json">', b'<script id="plotly" type="text')
_PAGE_START = b'<!doctype html>\n<html lang="en"'
_PNG_START = b"\x89PNG\r\n\x1a\n"
_SOFTWARE = b"tEXtSoftware\0"
_OLDER_SIZES = {(1350, round(150 * rows * 8 / 7.4)) for rows in (3.0, 5.0, 5.4, 7.4)}
"""Width and height of the pictures that earlier releases have drawn, which do not name mfwrap."""


def is_own_page(path: Path) -> bool:
    """Return whether a file is the page of runs, of this or an earlier release."""
    content = _content(path)
    start = content[:64].replace(b"\r\n", b"\n")  # earlier releases on Windows
    generator = f'<meta name="generator" content="{WRITER}">'.encode()
    return start.startswith(_PAGE_START) and any(
        mark in content for mark in (generator, *_OLDER_PAGES)
    )


def is_own_picture(path: Path) -> bool:
    """Return whether a file is the picture of a run, of this or an earlier release."""
    header = _content(path)[:1024]
    if not header.startswith(_PNG_START) or len(header) < 24:
        return False
    if _SOFTWARE + WRITER.encode() in header:
        return True
    size = struct.unpack(">II", header[16:24])
    is_near = any(abs(size[1] - height) <= 1 for width, height in _OLDER_SIZES if width == size[0])
    return is_near and _SOFTWARE + b"Matplotlib" in header


def _content(path: Path) -> bytes:
    """Return the content of a file; empty for a link, a folder, or a file that cannot be read."""
    if path.is_symlink() or not path.is_file():
        return b""
    try:
        return path.read_bytes()
    except OSError:
        return b""
