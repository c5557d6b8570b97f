"""Write and read files with one JSON object per line, which stay readable after a crash."""

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

from mfwrap.records.forms import fits

RECORD_NAMES = (
    "anomalies", "checkpoint_health", "fingerprints", "local_norms", "memory", "metrics",
    "progress", "rank_clock", "samples", "throughput", "training_state",
)  # fmt: skip
"""Names of the JSON Lines files of a run, see `rank_file`."""

_RANK = re.compile(r"(.*)_rank(\d+)")
_MOST_DIGITS = 308
"""Digits of an integer that is no number of ours; a float has no more."""


@final
class JsonLines:
    """Append records to a file, one JSON object per line.

    When `append` returns, the operating system has the record, so the record survives if the
    process is killed. If `append` raises, for example because the disk is full, the file ends with
    the record before. If a crash of the machine has cut off the last line of an existing file, that
    line is removed before the first new line is written. Only one process may write to the file.

    Args:
        path: The file. It and its folder are created with the first record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._has_checked_end = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record.

        Args:
            record: Values that JSON can represent. JSON has no NaN and no infinity; they are
                written as the strings ``"nan"``, ``"inf"`` and ``"-inf"``, which ``float`` reads.

        Raises:
            OSError: If the file cannot be written. Nothing of the record is left in the file.
        """
        line = json.dumps(to_plain(record), allow_nan=False).encode() + b"\n"
        try:
            if not self._has_checked_end:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                _end_with_a_line(self.path)
            self._has_checked_end = False
            append_whole(self.path, line)
            self._has_checked_end = True
        except OSError as error:
            # An error of `write` does not name the file.
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; skip blank lines, and a last line that a crash has cut off.

    Args:
        path: File that `JsonLines` wrote.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If another line is not a JSON object in valid UTF-8.
    """
    *lines, last = path.read_bytes().split(b"\n")
    numbered = enumerate(lines, start=1)
    records = [_record(path, number, line) for number, line in numbered if line.strip()]
    if is_object(last):
        records.append(_record(path, len(lines) + 1, last))
    # Otherwise the last line is empty (the file ends with a newline), or a crash has cut it off.
    return records


def last_record(
    path: Path, key: str, kind: type[Any] = object, *, step: int | None = None
) -> dict[str, Any] | None:
    """Return the last record that has a key; ``None`` if no record has it.

    Parses only lines with the key's name, so a file of many megabytes takes milliseconds. A missing
    file counts as an empty file.

    Args:
        path: File that `JsonLines` wrote.
        key: Name of the value.
        kind: Form of the value, see `mfwrap.records.forms`. Records with another one are left out.
        step: Step of the record; ``None`` for any step.
    """
    lines = path.read_bytes().split(b"\n") if path.exists() else []
    name = json.dumps(key).encode()
    records = (_parsed(line) or {} for line in reversed(lines) if name in line)
    found = (each for each in records if key in each and fits(each[key], kind))
    return next((each for each in found if step is None or each.get("step") == step), None)


def last_value(path: Path, key: str, kind: type[Any] = object) -> Any:
    """Return the value of a key in the last record that has it; see `last_record`."""
    record = last_record(path, key, kind)
    return None if record is None else record[key]


def rank_file(folder: Path, name: str, rank: int) -> Path:
    """Return a rank's file: ``<name>.jsonl`` for rank 0, else ``<name>_rank<rank>.jsonl``."""
    return folder / (f"{name}.jsonl" if rank == 0 else f"{name}_rank{rank}.jsonl")


def rank_files(folder: Path) -> Iterator[tuple[Path, str, int]]:
    """Yield path, name and rank of each JSON Lines file in a folder; see `rank_file`."""
    for path in sorted(path for path in folder.glob("*.jsonl") if path.is_file()):
        match = _RANK.fullmatch(path.stem)
        yield (path, path.stem, 0) if match is None else (path, match[1], int(match[2]))


def is_object(line: bytes) -> bool:
    """Return whether a line is a JSON object in valid UTF-8."""
    return _parsed(line) is not None


def step_of(line: bytes) -> int:
    """Return the step of a record; 0 if the line is not a record or the record has no step."""
    step = (_parsed(line) or {}).get("step")
    return step if isinstance(step, int) else 0


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    record = _parsed(line)
    if record is None:
        msg = (
            f"{path}:{number}: expected a JSON object in UTF-8, got {line[:80]!r}; move the file "
            "away to go on without it"
        )
        raise ValueError(msg)
    return record


def _parsed(line: bytes) -> dict[str, Any] | None:
    try:
        # Decode before parsing: given bytes, `json.loads` guesses the encoding and accepts lone
        # surrogates, which are invalid in UTF-8.
        record = parsed_json(line.decode("utf-8"))
    except (ValueError, RecursionError):  # RecursionError: brackets nested too deep
        return None
    return record if isinstance(record, dict) else None


def parsed_json(text: str) -> Any:
    """Return the value of a JSON text. An integer that is too large for a float becomes infinite.

    Raises:
        RecursionError: If brackets are nested too deep.
        ValueError: If the text is not JSON.
    """
    return json.loads(text, parse_int=_number)


def _number(digits: str) -> int | float:
    return int(digits) if len(digits) <= _MOST_DIGITS else float(digits)


def append_whole(path: Path, line: bytes) -> None:
    """Append a line to a file; if that fails, leave the file as it was.

    Raises:
        OSError: If the file cannot be written, for example because the disk is full.
    """
    with path.open("ab", buffering=0) as file:
        length = os.fstat(file.fileno()).st_size
        rest = line
        try:
            # If the disk is nearly full, `write` writes a part of the line and does not raise.
            while rest:
                rest = rest[file.write(rest) :]
        except BaseException:
            # If truncating fails as well, raise the first error, and let the next append repair
            # the end of the file.
            with contextlib.suppress(OSError):
                file.truncate(length)
            raise


def _end_with_a_line(path: Path) -> None:
    """Make a file end with a newline: complete a last line that lacks only the newline, or cut it.

    Does nothing if the file does not exist or is empty.
    """
    content = path.read_bytes() if path.exists() else b""
    start = content.rfind(b"\n") + 1
    if is_object(content[start:]):
        with path.open("ab") as file:
            file.write(b"\n")
    elif start < len(content):
        os.truncate(path, start)


def to_plain(value: Any) -> Any:
    """Return a value for JSON, which has no NaN and no infinity: they become strings."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(item) for item in value]
    return value
