"""Records of a run in a file, one JSON object a line, that outlive a crash."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

__all__ = ["JsonLines", "read_json_lines"]


@final
class JsonLines:
    """Append records to a file.

    Each record is one line and has left the process when `append` returns, so that what a process
    wrote before it was killed is there. A line that a crash of the machine has torn at the end of
    the file is cut off before the next one is written. The file belongs to one process.

    Args:
        path: The file; made with its folder at the first record.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._is_whole = False

    def append(self, record: Mapping[str, Any]) -> None:
        """Write one record.

        Args:
            record: What JSON can hold. A float that is not finite, for which JSON has no number,
                becomes the string that ``float`` reads: ``"nan"``, ``"inf"`` or ``"-inf"``.

        Raises:
            OSError: If the file cannot be written.
        """
        line = json.dumps(_plain(record), allow_nan=False) + "\n"
        if not self._is_whole:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            _cut_torn_line(self.path)
            self._is_whole = True
        # Without a buffer, in one call: a kill leaves a whole line or none.
        with self.path.open("ab", buffering=0) as file:
            file.write(line.encode())


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file, without a last line that is torn.

    Args:
        path: What `JsonLines` wrote.

    Raises:
        FileNotFoundError: If there is no such file.
        ValueError: If a line that is not the last one is no JSON object.
    """
    *lines, last = path.read_bytes().split(b"\n")
    records = [_record(path, number, line) for number, line in enumerate(lines, start=1)]
    try:
        records.append(_record(path, len(lines) + 1, last))
    except ValueError:
        # Nothing, behind the end of the last line, or the beginning of a line.
        return records
    return records


def _record(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError:
        record = None
    if not isinstance(record, dict):
        msg = f"line {number} of {path} must be a JSON object, got {line[:80]!r}"
        raise ValueError(msg)  # noqa: TRY004  (the content of a file, no argument's type)
    return record


def _cut_torn_line(path: Path) -> None:
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
