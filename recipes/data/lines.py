"""The lines of data files, and the faults that the library `datasets` does not name or notice."""

import bz2
import csv
import gzip
import itertools
import json
import lzma
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, final

OPENERS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {".bz2": bz2.open, ".gz": gzip.open, ".xz": lzma.open}
)
"""Functions that open compressed files, by the ending of the file."""

Lines = Iterator[tuple[str, str]]
"""Place (``file:line``) and text of each line."""

TableRows = Iterator[tuple[str, list[str]]]
"""Place (``file:line``, of its first line) and fields of each row of a table."""


def read_lines(setting: str, files: Iterable[str]) -> Lines:
    """Yield the lines of text files, except blank lines.

    Args:
        setting: Key that names the files, for error messages.
        files: Paths of the files.

    Raises:
        ValueError: If a file cannot be read, or a line is not UTF-8. The message names the line.
    """
    for file in files:
        yield from ((place, line) for place, line in _all_lines(setting, file) if line.strip())


def check_json_lines(setting: str, files: Collection[str], checked: Collection[str] = ()) -> None:
    """Check that each line of JSON Lines files is a JSON object, and that there is one.

    The library cannot be asked first, because a line ``null`` crashes it.

    Args:
        setting: Key that names the files, for error messages.
        files: Paths of the files.
        checked: Columns whose values the task checks.

    Raises:
        ValueError: If a line is not a JSON object, there are only blank lines, or another column
            has strings and numbers. The message names the line.
    """
    wanted = f"`{setting}` must hold one JSON object per line"
    place, kinds = None, {file: _Kinds(setting, checked) for file in files}
    for place, line in read_lines(setting, files):
        text = line.strip()
        try:
            row = json.loads(text)
        except (RecursionError, ValueError) as error:
            msg = f"{wanted}, got {text[:60]!r} ({_reason(error)}) at {place}"
            raise ValueError(msg) from error
        fault = _row_fault(row, is_escaped=_is_escaped(text))
        if fault is not None:
            msg = f"{wanted}, got {fault}{text[:60]!r} at {place}"
            raise ValueError(msg)
        kinds[place.rpartition(":")[0]].add(row, f"at {place}")
    if place is None:
        msg = (
            f"`{setting}` is empty ({', '.join(files)}); put one JSON object on each line, or name "
            "another file"
        )
        raise ValueError(msg)


def check_json(
    setting: str, files: Iterable[str], key: str | None, checked: Collection[str] = ()
) -> None:
    """Check that JSON files hold a list of objects, or one JSON object per line.

    The library reads other values as a row, and half of a surrogate pair as an empty text.

    Args:
        setting: Key that names the files, for error messages.
        files: Paths of the files.
        key: Key of the list in each file; ``None`` if the file is the list.
        checked: Columns whose values the task checks.

    Raises:
        ValueError: If a file does not hold such a list, or another column has strings and numbers.
            The message names the line or the row.
    """
    wanted = f"`{setting}` must hold a list of objects"
    wanted = wanted if key is None else f"{wanted} under the key {key!r}"
    for file in files:
        kinds = _Kinds(setting, checked)
        text = "".join(line for _, line in _all_lines(setting, file))
        try:
            content = json.loads(text)
        except (RecursionError, ValueError) as error:
            if key is None and text.lstrip().startswith("{"):
                check_json_lines(setting, [file], checked)
                continue
            at = f"{file}:{getattr(error, 'lineno', 1)}"
            msg = f"`{setting}` must hold JSON, got a fault ({_reason(error)}) at {at}"
            raise ValueError(msg) from error
        hint = ""
        if key is not None:
            content = content.get(key) if isinstance(content, dict) else None
        elif isinstance(content, dict):
            lists = [name for name, value in content.items() if isinstance(value, list)]
            hint = f"; if its key {lists[0]!r} is the list, set `field` to it" if lists else ""
        if not isinstance(content, list) or not content:
            msg = f"{wanted}, got {content!r:.60} in {file}{hint}"
            raise ValueError(msg)
        is_escaped = _is_escaped(text)
        for number, row in enumerate(content, start=1):
            fault = _row_fault(row, is_escaped=is_escaped)
            if fault is not None:
                msg = f"{wanted}, got {fault}{row!r:.60} in row {number} of {file}"
                raise ValueError(msg)
            kinds.add(row, f"in row {number} of {file}")


def checked_table(
    setting: str, files: Iterable[str], delimiter: str, column_names: Sequence[str] | None
) -> Iterator[tuple[Sequence[str], list[str]]]:
    """Yield the names of the columns and the fields of each row of tables (CSV).

    The library fills a short row with nulls, and shifts a long first row.

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
    first: tuple[str, Sequence[str]] | None = None
    for file in files:
        rows = table_rows(setting, file, delimiter)
        names = column_names
        if names is None:
            names = _header(setting, rows, delimiter)
            first = (file, names) if first is None else first
            lacking = lacking_column(*first, file, names)
            if lacking is not None:
                msg = f"`{setting}` must hold files with the same columns, but {lacking}"
                raise ValueError(msg)
        place = None
        for place, fields in rows:
            if len(fields) != len(names):
                says = f"{len(names)} fields in each row, as many as columns"
                msg = f"`{setting}` must have {says}, got {len(fields)} at {place}"
                raise ValueError(msg)
            yield names, fields
        if place is None:
            wanted = "rows" if column_names is not None else "a header and rows"
            msg = f"`{setting}` must hold {wanted}, got none in {file}"
            raise ValueError(msg)


def lacking_column(
    first: str, names: Collection[str], other: str, others: Collection[str]
) -> str | None:
    """Return which of two files lacks which column of the other file; ``None`` if neither does."""
    for (file, has), (without, lacks) in itertools.permutations([(first, names), (other, others)]):
        for name in has:
            if name not in lacks:
                return f"{without} lacks {name!r:.60}, which {file} has"
    return None


def table_rows(setting: str, file: str, delimiter: str) -> TableRows:
    """Yield the rows of a table (CSV), except blank lines; the first row may be a header.

    A row has several lines if its fields have line breaks.

    Args:
        setting: Key that names the file, for error messages.
        file: Path of the file.
        delimiter: Character between two fields.

    Raises:
        ValueError: See `read_lines`.
    """
    former_limit = csv.field_size_limit(2**31 - 1)  # by default 128 KiB
    try:
        lines = (line for _, line in _all_lines(setting, file))
        reader = csv.reader(lines, delimiter=delimiter)
        before = 0
        for fields in reader:
            if any(field.strip() for field in fields) or len(fields) > 1:
                yield f"{file}:{before + 1}", fields
            before = reader.line_num
    except csv.Error as error:
        msg = f"`{setting}` must hold a table, got {error} at {file}:{reader.line_num}"
        raise ValueError(msg) from error
    finally:
        csv.field_size_limit(former_limit)


def _header(setting: str, rows: TableRows, delimiter: str) -> list[str]:
    place, names = next(rows, ("", []))
    repeated = next((name for name in names if names.count(name) > 1), None)
    if repeated is not None:
        msg = f"`{setting}` must have columns of different names, got {repeated!r:.60} twice"
        msg = f"{msg} at {place}"
        raise ValueError(msg)
    other = next((one for one in ";\t,|" if len(names) == 1 and one in names[0]), None)
    if other is not None:
        wanted = f"columns separated by {delimiter!r}; set `delimiter` to {other!r} if that is"
        msg = f"`{setting}` must have {wanted} the delimiter, got the header {names[0]!r:.60}"
        msg = f"{msg} at {place}"
        raise ValueError(msg)
    return names


def _all_lines(setting: str, file: str) -> Lines:
    """Yield all lines of a file, which may be compressed, with their line breaks."""
    number = 0
    try:
        with OPENERS.get(Path(file).suffix, open)(file, "rb") as content:
            for number, line in enumerate(content, start=1):
                # A byte order mark may precede the first line.
                yield f"{file}:{number}", line.decode("utf-8-sig" if number == 1 else "utf-8")
    except UnicodeDecodeError as error:
        got = f"the byte 0x{error.object[error.start]:02x} at {file}:{number}"
        msg = f"`{setting}` must hold UTF-8 text, got {got}; save the file as UTF-8"
        raise ValueError(msg) from error
    except (EOFError, OSError, lzma.LZMAError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or error
        msg = f"`{setting}` must name readable files, got {file!r}: {reason}"
        raise ValueError(msg) from error


@final
class _Kinds:
    """Refuse a column of JSON with strings and numbers.

    The library reads such a column as JSON once more, so that the string ``"007"`` becomes 7.

    Args:
        setting: Key that names the files, for error messages.
        left_out: Columns that are not looked at.
    """

    def __init__(self, setting: str, left_out: Collection[str]) -> None:
        self._setting, self._left_out = setting, left_out
        self._first: dict[str, tuple[bool, str]] = {}

    def add(self, row: Mapping[str, Any], where: str) -> None:
        """Include a row, or raise an error that names it and an earlier one.

        Args:
            row: The row.
            where: Says where it is.

        Raises:
            ValueError: If a column has strings and numbers.
        """
        for name, value in row.items():
            is_other = not isinstance(value, (str, int, float)) or isinstance(value, bool)
            if is_other or name in self._left_out:
                continue
            is_text = isinstance(value, str)
            before = self._first.setdefault(name, (is_text, f"{value!r:.40} {where}"))
            if before[0] is not is_text:
                msg = (
                    f"`{self._setting}` must have strings or numbers in a column, not both; "
                    f"{name!r} is {before[1]}, and {value!r:.40} {where}: write all of them as "
                    "strings, or all as numbers"
                )
                raise ValueError(msg)


def _reason(error: Exception) -> str:
    return str(getattr(error, "msg", error))  # without position, as `json` adds it


def _is_escaped(text: str) -> bool:
    """Return whether JSON may have half of a surrogate pair, which only an escape can be."""
    return "\\ud" in text or "\\uD" in text


def _row_fault(row: object, *, is_escaped: bool) -> str | None:
    """Return words before a faulty row in an error message; ``None`` if the row is an object."""
    if not isinstance(row, dict):
        return ""
    try:
        if is_escaped:
            json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return "half of a surrogate pair in "
    return None
