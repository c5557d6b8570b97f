"""Write and read files with one JSON object per line, which stay readable after a crash."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final


@final
class JsonLines:
    """Append records to a file, one JSON object per line.

    When `append` returns, the operating system has the record, so the record survives if the
    process is killed. If a crash of the machine has cut off the last line of an existing file, that
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
            OSError: If the file cannot be written.
        """
        line = json.dumps(_plain(record), allow_nan=False) + "\n"
        if not self._has_checked_end:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _remove_cut_off_line(self.path)
            self._has_checked_end = True
        # One unbuffered write: if the process is killed, the file has the whole line or nothing.
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, and skip a last line that a crash has cut off.

    Args:
        path: File that `JsonLines` wrote.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a line other than the last one is not a JSON object.
    """
    *lines, last = path.read_bytes().split(b"\n")
    records = [_record(path, number, line) for number, line in enumerate(lines, start=1)]
    try:
        records.append(_record(path, len(lines) + 1, last))
    except ValueError:
        # The last line is not a record: it is empty (the file ends with a newline), or a crash has
        # cut it off.
        return records
    return records


def rank_file(folder: Path, name: str, rank: int) -> Path:
    """Return a rank's file: ``<name>.jsonl`` for rank 0, else ``<name>_rank<rank>.jsonl``."""
    return folder / (f"{name}.jsonl" if rank == 0 else f"{name}_rank{rank}.jsonl")


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        msg = f"{path}:{number}: expected a JSON object, got {line[:80]!r}"
        raise ValueError(msg)  # noqa: TRY004  (the content of a file, not the type of an argument)
    return record


def _remove_cut_off_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    if not content.endswith(b"\n"):
        with path.open("r+b") as file:
            file.truncate(content.rfind(b"\n") + 1)


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value
