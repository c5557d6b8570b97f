"""Check the lines of data files, and name the file and the line of a fault."""

import bz2
import csv
import gzip
import json
import lzma
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

_MAX_BYTES = 64 * 1024 * 1024
"""Limit above the length of any line of text. Without it, a file without line breaks, such as an
archive, would be read into memory as a single line."""

_MAX_DEPTH = 100
"""Limit above the depth of any row. The library `datasets` fails above about 1,000 levels."""

OPENERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}
)
"""Functions that open compressed files, by the ending of the file."""


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
        for number, line in enumerate(_all_lines(setting, file), start=1):
            if line.strip():
                yield Line(file, number, line)


def read_text(setting: str, file: str) -> str:
    """Return the whole text of a file.

    Args:
        setting: See `read_lines`.
        file: Path of the file.

    Raises:
        ValueError: See `read_lines`.
    """
    text = "".join(_all_lines(setting, file))
    return text.replace("\r\n", "\n").replace("\r", "\n")


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


def check_json(setting: str, files: Iterable[str], key: str | None) -> None:
    """Check that JSON files hold a list of objects, or one JSON object per line.

    Args:
        setting: Key that names the files, for error messages.
        files: Paths of the files.
        key: Key of the list in each file; ``None`` if the file is the list.

    Raises:
        ValueError: If a file does not hold such a list. The message names the line or the row.
    """
    for file in files:
        text = read_text(setting, file)
        try:
            content = json.loads(text)
        except RecursionError:
            msg = f"`{setting}` must have at most {_MAX_DEPTH} nested levels, got more in {file}"
            raise ValueError(msg) from None
        except ValueError as error:
            if key is None and text.lstrip().startswith("{"):
                check_json_lines(setting, [file])
                continue
            at = f"{file}:{getattr(error, 'lineno', 1)}"
            reason = getattr(error, "msg", error)
            msg = f"`{setting}` must hold JSON, got a fault ({reason}) at {at}"
            raise ValueError(msg) from error
        _check_json_rows(setting, file, content, key)


def _check_json_rows(setting: str, file: str, content: Any, key: str | None) -> None:
    wanted = "a list of objects"
    if key is not None:
        wanted = f"{wanted} under the key {key!r}"
        content = content.get(key) if isinstance(content, dict) else None
    elif isinstance(content, dict):
        lists = [name for name, value in content.items() if isinstance(value, list)]
        hint = f"; if its key {lists[0]!r} is the list, set `field` to it" if lists else ""
        msg = f"`{setting}` must hold {wanted}, got one object in {file}{hint}"
        raise ValueError(msg)
    if not isinstance(content, list) or not content:
        msg = f"`{setting}` must hold {wanted}, got {content!r:.60} in {file}"
        raise ValueError(msg)
    for number, row in enumerate(content, start=1):
        fault = f"{row!r:.60}" if not isinstance(row, dict) else _row_fault(row)
        if fault is not None:
            msg = f"`{setting}` must hold {wanted}, got {fault} in row {number} of {file}"
            raise ValueError(msg)


def checked_table(
    setting: str, files: Iterable[str], delimiter: str, column_names: Sequence[str] | None
) -> Iterator[tuple[Sequence[str], "TableRow"]]:
    """Yield the rows of tables (CSV) with the names of their columns.

    Args:
        setting: Key that names the files, for error messages.
        files: Paths of the files.
        delimiter: Character between two fields.
        column_names: Names of the columns if the files have no header; otherwise ``None``.

    Raises:
        ValueError: If a row has more or fewer fields than the table has columns, if two columns
            have the same name, if a file has no row, or if a file lacks a column of the first file
            or has another one. The message names the file, and the line if there is one.
    """
    first: TableRow | None = None
    for file in files:
        rows = table_rows(setting, file, delimiter)
        header = next(rows, None) if column_names is None else None
        names = (column_names or ()) if header is None else header.fields
        if header is not None:
            _check_header(setting, header, delimiter)
            first = header if first is None else first
            _check_same_columns(setting, first, header)
        row = None
        for row in rows:
            if len(row.fields) != len(names):
                says = f"{len(names)} fields in each row, as many as columns"
                msg = f"`{setting}` must have {says}, got {len(row.fields)} at {row.place}"
                raise ValueError(msg)
            yield names, row
        if row is None:
            wanted = "rows" if column_names is not None else "a header and rows"
            msg = f"`{setting}` must hold {wanted}, got none in {file}"
            raise ValueError(msg)


def _check_same_columns(setting: str, first: "TableRow", header: "TableRow") -> None:
    for has, lacks in ((first, header), (header, first)):
        missing = [name for name in has.fields if name not in lacks.fields]
        if missing:
            says = f"but {lacks.file} lacks {missing[0]!r:.60}, which {has.file} has"
            msg = f"`{setting}` must hold files with the same columns, {says}"
            raise ValueError(msg)


class TableRow(NamedTuple):
    """A row of a table (CSV), which may have several lines if its fields have line breaks."""

    file: str
    number: int
    """Number of the first line of the row, counted from 1."""

    fields: list[str]

    @property
    def place(self) -> str:
        """``file:line``, for error messages."""
        return f"{self.file}:{self.number}"


def table_rows(setting: str, file: str, delimiter: str) -> Iterator[TableRow]:
    """Yield the rows of a table (CSV), except blank lines; the first row may be a header.

    Args:
        setting: Key that names the file, for error messages.
        file: Path of the file.
        delimiter: Character between two fields.

    Raises:
        ValueError: See `read_lines`. Also if a field is longer than 64 MiB.
    """
    former_limit = csv.field_size_limit(_MAX_BYTES)  # by default 128 KiB
    try:
        reader = csv.reader(_all_lines(setting, file), delimiter=delimiter)
        before = 0
        for fields in reader:
            if any(field.strip() for field in fields) or len(fields) > 1:
                yield TableRow(file, before + 1, fields)
            before = reader.line_num
    except csv.Error as error:
        msg = f"`{setting}` must hold a table, got {error} at {file}:{reader.line_num}"
        raise ValueError(msg) from error
    finally:
        csv.field_size_limit(former_limit)


def _check_header(setting: str, header: TableRow, delimiter: str) -> None:
    names = header.fields
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        msg = f"`{setting}` must have columns of different names, got {repeated!r:.60} twice"
        msg = f"{msg} at {header.place}"
        raise ValueError(msg)
    other = next((one for one in ";\t,|" if len(names) == 1 and one in names[0]), None)
    if other is not None:
        wanted = f"columns separated by {delimiter!r}; set `delimiter` to {other!r} if that is"
        msg = f"`{setting}` must have {wanted} the delimiter, got the header {names[0]!r:.60}"
        msg = f"{msg} at {header.place}"
        raise ValueError(msg)


def _all_lines(setting: str, file: str) -> Iterator[str]:
    """Yield all lines of a file, which may be compressed, with their line breaks."""
    try:
        with OPENERS.get(Path(file).suffix, open)(file, "rb") as content:
            number = 0
            while line := content.readline(_MAX_BYTES + 1):
                number += 1
                yield _decoded(setting, file, number, line)
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        msg = f"`{setting}` must name readable files, got {file!r}: {reason}"
        raise ValueError(msg) from error


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
    # Only a line with many brackets can be nested deeply, and only an escape can be half of a
    # surrogate pair, so few rows are measured.
    if text.count("[") + text.count("{") > _MAX_DEPTH or "\\ud" in text.lower():
        return _row_fault(row)
    return None


def _row_fault(row: Mapping[str, Any]) -> str | None:
    """Return why the library `datasets` cannot read a row; ``None`` if it can."""
    if _is_deep(row, _MAX_DEPTH):
        return f"more than {_MAX_DEPTH} nested levels"
    try:
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return f"half of a surrogate pair in {row!r:.60}"
    return None


def _is_deep(value: Any, levels: int) -> bool:
    """Return whether lists and mappings are nested in more than `levels` levels."""
    if not isinstance(value, (dict, list)):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return levels == 0 or any(_is_deep(one, levels - 1) for one in inner)
