"""Check the lines of data files, and name the file and the line of a fault."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

_MAX_BYTES = 64 * 1024 * 1024
"""Limit above the length of any line of text. Without it, a file without line breaks, such as an
archive, would be read into memory as a single line."""

_MAX_DEPTH = 100
"""Limit above the depth of any row. The library `datasets` fails above about 1,000 levels."""


class Line(NamedTuple):
    """A line of a text file that is not blank."""

    file: str
    number: int
    """Number of the line, counted from 1."""

    text: str

    @property
    def place(self) -> str:
        """``file:line``, for error messages."""
        return f"{self.file}:{self.number}"


def read_lines(setting: str, files: Iterable[str]) -> Iterator[Line]:
    """Yield the lines of text files, except blank lines.

    Args:
        setting: Key that names the files, for error messages.
        files: Paths of the files.

    Raises:
        ValueError: If a file cannot be read, or a line is not UTF-8 or is longer than 64 MiB. The
            message names the line.
    """
    for file in files:
        try:
            with Path(file).open("rb") as content:
                for number in _counted_from_1():
                    line = content.readline(_MAX_BYTES + 1)
                    if not line:
                        break
                    if line.strip():
                        yield Line(file, number, _decoded(setting, file, number, line))
        except OSError as error:
            msg = f"`{setting}` must name readable files, got {file!r}: {error.strerror}"
            raise ValueError(msg) from error


def check_json_lines(setting: str, files: Iterable[str]) -> None:
    """Check that each line of JSON Lines files is a JSON object, and that there is one.

    Args:
        setting: Key that names the files, for error messages.
        files: Paths of the files.

    Raises:
        ValueError: If a line is not a JSON object, or there are only blank lines. The message names
            the line.
    """
    names = list(files)
    line = None
    for line in read_lines(setting, names):
        fault = _fault(line.text)
        if fault is not None:
            msg = f"`{setting}` must hold one JSON object per line, got {fault} at {line.place}"
            raise ValueError(msg)
    if line is None:
        msg = f"`{setting}` must hold one JSON object per line, got no line in {', '.join(names)}"
        raise ValueError(msg)


def _counted_from_1() -> Iterator[int]:
    number = 0
    while True:
        number += 1
        yield number


def _decoded(setting: str, file: str, number: int, line: bytes) -> str:
    if len(line) > _MAX_BYTES:
        limit = f"{_MAX_BYTES // 1024**2} MiB"
        msg = f"`{setting}` must hold lines of at most {limit}, got a longer one at {file}:{number}"
        raise ValueError(msg)
    try:
        # A byte order mark may precede the first line.
        return line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        got = f"the byte 0x{line[error.start]:02x} at {file}:{number}"
        msg = f"`{setting}` must hold UTF-8 text, got {got}"
        raise ValueError(msg) from error


def _fault(text: str) -> str | None:
    """Return what is wrong with a line of a JSON Lines file; ``None`` if it is a JSON object."""
    try:
        row = json.loads(text.strip())
    except RecursionError:
        return f"more than {_MAX_DEPTH} nested levels"
    except ValueError as error:
        reason = getattr(error, "msg", error)  # `int` raises a ValueError without `msg`
        return f"{text.strip()[:60]!r} ({reason})"
    if not isinstance(row, dict):
        return f"{text.strip()[:60]!r}"
    # Only a line with many brackets can be nested deeply, so few lines are measured.
    if text.count("[") + text.count("{") > _MAX_DEPTH and _is_deep(row, _MAX_DEPTH):
        return f"more than {_MAX_DEPTH} nested levels"
    if "\\ud" in text.lower():
        try:
            json.dumps(row, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            return f"half of a surrogate pair in {text.strip()[:60]!r}"
    return None


def _is_deep(value: Any, levels: int) -> bool:
    """Return whether lists and mappings are nested in more than `levels` levels."""
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deep(one, levels - 1) for one in inner)
