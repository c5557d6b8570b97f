"""Check that the rows of a user's data fit a task, and name the first row that does not."""

import io
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np
import PIL.Image
import torch
from datasets import ClassLabel, Dataset, Image, List, Value

from mfwrap.recipes.data.fields import is_number
from mfwrap.recipes.data.source import ColumnUse, DataError

_FLOAT32_MAX = torch.finfo(torch.float32).max


@final
@dataclass(frozen=True)
class Kind:
    """Requirements for the values of a column."""

    expect: Callable[[Any], tuple[str, Callable[[Any], bool]]]
    """Takes the value of the first row. Returns a description of values that fit, and a function
    that tests whether a value fits."""

    dtypes: str = r"(?!)"
    """Regular expression for arrow types whose values always fit, except null. The rows of a column
    of such a type are not read one by one. The default matches no type."""

    as_long_as: str | None = None
    """Name of another column, checked earlier. In each row, both values must have the same
    length."""

    use: ColumnUse | None = None
    """How a column is read from a file without types; ``None`` if every file has its type."""

    fault: Callable[[Any], str | None] = lambda _: None
    """Says what is wrong with a value that does not fit; ``None`` shows the value itself."""


Columns = Mapping[str, Kind]
"""Kind of each column that a task needs."""


def needed_columns(needs: Sequence[Columns], found: Collection[str]) -> Columns | None:
    """Return the first set in `needs` whose columns all exist; ``None`` if each set lacks a column.

    Args:
        needs: Alternative sets of columns of a task, in order of precedence.
        found: Names of the columns of the data.
    """
    return next((columns for columns in needs if columns.keys() <= set(found)), None)


def check_rows(
    rows: Dataset, columns: Columns, names: Mapping[str, str], like: Dataset | None = None
) -> None:
    """Check that every value fits the kind of its column.

    Args:
        rows: Rows whose columns have the task's names.
        columns: Columns to check.
        names: The user's name of each renamed column, keyed by the task's name. Messages use the
            user's names.
        like: Rows whose first row decides what fits; by default, and for a column that they lack,
            `rows`.

    Raises:
        DataError: If a value does not fit. The message names column, row and value.
    """
    for column, kind in columns.items():
        is_alone = like is None or column not in like.column_names
        _check(rows, names, column, kind, rows if is_alone else like)


def check_numbers(rows: Dataset) -> None:
    """Check that every value of every column is a finite number; see `check_rows`."""
    check_rows(rows, dict.fromkeys(rows.column_names, NUMBER), {})


def _check(rows: Dataset, names: Mapping[str, str], column: str, kind: Kind, like: Dataset) -> None:
    is_of_same_type = rows.features[column] == like.features[column]
    if not len(rows) or (is_of_same_type and _is_clean(rows, column, kind.dtypes)):
        return
    first = next(_values(like, column), None)
    wanted, fits = kind.expect(first)
    misfit, others = _misfits(rows, column, fits)
    if misfit is not None:
        number, value = misfit
        fault = kind.fault(value)
        raise _error(names, column, wanted, value, number, fault=fault, others=others)
    if kind.as_long_as is not None:
        others = rows[kind.as_long_as]
        for number, (other, value) in enumerate(zip(others, rows[column], strict=True), 1):
            if len(other) != len(value):
                name = names.get(kind.as_long_as, kind.as_long_as)
                raise _error(
                    names, column, f"as many values as `{name}` ({len(other)})", value, number
                )


def _misfits(
    rows: Dataset, column: str, fits: Callable[[Any], bool]
) -> tuple[tuple[int, Any] | None, list[int]]:
    """Return the first value that does not fit with its row, and the rows of the others."""
    misfit: tuple[int, Any] | None = None
    others: list[int] = []
    for number, value in enumerate(_values(rows, column), start=1):
        if fits(value):
            continue
        if misfit is not None and is_number(misfit[1]) and not is_number(value):
            # One text makes a whole column text, so name a text that is not a number.
            misfit, others = None, []
        if misfit is None:
            misfit = number, value
        elif is_number(misfit[1]) or not is_number(value):
            others.append(number)
    return misfit, others


def _error(
    names: Mapping[str, str],
    column: str,
    wanted: str,
    value: Any,
    number: int,
    *,
    fault: str | None = None,
    others: Sequence[int] = (),
) -> DataError:
    name = names.get(column, column)
    if fault is None:
        fault = _form(value) if isinstance(value, PIL.Image.Image) else shown(value)
    got = f"{fault} in row {number} (counted from 1)"
    msg = f"`data` must have {wanted} in each row of column `{name}`, got {got}"
    return DataError(msg, number, others)


def shown(value: Any) -> str:
    """Return a value for a message, cut after 60 characters."""
    return "an empty value (null)" if value is None else f"{value!r:.60}"


def _is_clean(rows: Dataset, column: str, dtypes: str) -> bool:
    """Return whether the type of a column guarantees that all values fit."""
    feature = rows.features[column]
    if not isinstance(feature, Value) or re.fullmatch(dtypes, feature.dtype) is None:
        return False
    values = rows.data.column(column)
    try:
        values.validate(full=True)
    except ValueError:  # arrow raises ValueError for bytes that are not UTF-8
        return False
    return bool(values.null_count == 0)


@final
class ClassCheck:
    """Check the classes of a data set, whose parts are checked one after the other.

    Args:
        column: Column with a class, or a list of classes, in each row.
        limit: Number of classes of the model; ``None`` if it follows from the data.
    """

    def __init__(self, column: str, limit: int | None) -> None:
        self._column = column
        self._limit = limit
        self._found: set[Any] = set()
        self._listed: list[str] | None = None

    def check(self, rows: Dataset, names: Mapping[str, str], *, is_closed: bool = False) -> None:
        """Check rows, and remember their classes; see `check_rows`.

        Args:
            rows: Rows whose columns have the task's names.
            names: The user's name of each renamed column.
            is_closed: Whether rows that were checked earlier have all classes. If the model has a
                given number of classes, or the type of the column lists them, this has no effect.

        Raises:
            DataError: If there are more classes than the model has, if some classes are strings and
                others numbers, if a class is not one of those that the type of the column lists, or
                if earlier rows have all classes, but not this one.
        """
        feature = rows.features[self._column]
        is_list = isinstance(feature, List)
        inner = feature.feature if is_list else feature
        listed = range(len(inner.names)) if isinstance(inner, ClassLabel) else None
        if listed is not None:
            self._check_names(inner.names)
            self._found.update(listed)
            if self._limit is not None and len(listed) > self._limit:
                wanted = f"at most {self._limit} classes, as many as the model,"
                msg = f"`data` must have {wanted} got the type {inner} with {len(listed)} classes"
                raise DataError(msg)
        values = rows[self._column] if is_list else rows.unique(self._column)
        classes = {one for row in values for one in row} if is_list else set(values)
        found = self._found | classes
        is_closed = is_closed and self._limit is None and listed is None
        if self._fit(found, listed) and not (is_closed and classes - self._found):
            self._found = found
            return
        for number, value in enumerate(_values(rows, self._column), start=1):
            for one in value if is_list else [value]:
                if not self._fit(self._found | {one}, listed):
                    raise _error(names, self._column, self._wanted(one, listed), one, number)
                if is_closed and one not in self._found:
                    known = f"{sorted(self._found)!r:.200}"
                    wanted = f"a class of the training rows, {known},"
                    raise _error(names, self._column, wanted, one, number)
                self._found.add(one)

    def _check_names(self, listed: list[str]) -> None:
        """Check that a class has the same number in all parts of a data set."""
        if self._listed not in (None, listed):
            says = f"the classes that the type of the training rows lists, {self._listed!r:.200}"
            msg = f"`data` must have {says}, in held-out rows, got {listed!r:.200}"
            raise DataError(msg)
        self._listed = listed

    def check_number(self) -> None:
        """Raise `DataError` if all rows together have fewer than two classes."""
        if len(self._found) < 2:
            msg = f"`data` must have at least two classes, got {sorted(self._found)!r:.60}"
            raise DataError(msg)

    def _fit(self, classes: Collection[Any], listed: range | None) -> bool:
        if listed is not None:
            return set(classes) <= set(listed)
        are_strings = {isinstance(one, str) for one in classes}
        return len(are_strings) <= 1 and (self._limit is None or len(classes) <= self._limit)

    def _wanted(self, value: Any, listed: range | None) -> str:
        if listed is not None:
            return f"a class in [0, {len(listed)})"
        known = f"{sorted(self._found)!r:.60}"
        if any(isinstance(one, str) != isinstance(value, str) for one in self._found):
            return f"classes of one type, as in earlier rows ({known}),"
        return f"at most {self._limit} classes, as many as the model (here {known}),"


def _values(rows: Dataset, column: str) -> Iterator[Any]:
    if isinstance(rows.features[column], Image):
        # Read only the header of each image, which has its size and mode.
        for stored in rows.cast_column(column, Image(decode=False)).with_format(None)[column]:
            yield None if stored is None else _opened(stored)
        return
    values = iter(rows.with_format(None)[column])
    while True:
        try:
            yield next(values)
        except StopIteration:
            return
        except UnicodeDecodeError as error:
            yield error.object  # the bytes, which are not a valid value of any column


def is_text(value: Any) -> bool:
    """Return whether a value is a string."""
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    """Return whether a value is a number that float32 can hold; nan and infinity are not."""
    return isinstance(value, (int, float)) and abs(value) <= _FLOAT32_MAX


def _expect_label(first: Any) -> tuple[str, Callable[[Any], bool]]:
    if is_text(first):
        return f"a string (like {first!r:.40} in row 1)", is_text
    if _is_number(first):
        return f"a number (like {first!r} in row 1)", _is_number
    return "a string or a number", lambda _: False


def _expect_labels(first: Any) -> tuple[str, Callable[[Any], bool]]:
    kinds = [is_text, _is_number]
    if isinstance(first, list) and first:
        kinds = [kind for kind in kinds if kind(first[0])]

    def fits(value: Any) -> bool:
        return isinstance(value, list) and any(all(map(kind, value)) for kind in kinds)

    return "a list of only strings or only numbers", fits


def _expect_numbers(first: Any) -> tuple[str, Callable[[Any], bool]]:
    def are_numbers(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(map(_is_number, value))

    if not are_numbers(first):
        return "a list of numbers", are_numbers
    wanted = f"a list of {len(first)} numbers (as in row 1)"
    return wanted, lambda value: are_numbers(value) and len(value) == len(first)


def _opened(stored: Mapping[str, Any]) -> Any:
    content = stored["path"] if stored["bytes"] is None else io.BytesIO(stored["bytes"])
    try:
        return PIL.Image.open(content)
    except OSError:
        return content


def _expect_image(first: Any) -> tuple[str, Callable[[Any], bool]]:
    form = _form(first)
    if form is None:
        return "an image, or rows of numbers", lambda _: False
    wanted = f"an image of {form} (as in row 1)"
    return wanted, lambda value: _form(value) == form


def _form(image: Any) -> str | None:
    """Return size and channels of an image; ``None`` for another value."""
    if isinstance(image, PIL.Image.Image):
        return f"{image.width} x {image.height} pixels, mode {image.mode}"
    try:
        values = np.asarray(image)
    except ValueError:  # rows of different lengths
        return None
    if values.ndim not in {2, 3} or values.dtype.kind not in "biuf" or not values.size:
        return None
    return f"shape {values.shape}"


STRINGS = "(large_)?string"
"""Arrow types of strings, as `Kind.dtypes` takes them."""

# Floats are left out: they may be nan or infinite, so their rows are read one by one.
_NUMERIC = r"u?int\d+|bool"

TEXT = Kind(lambda _: ("a string", is_text), STRINGS, use="text")
LABEL = Kind(_expect_label, f"{STRINGS}|{_NUMERIC}", use="class")
NUMBER = Kind(lambda _: ("a finite number", _is_number), _NUMERIC, use="number")
NUMBERS = Kind(_expect_numbers, use="number")
WORDS = Kind(
    lambda _: (
        "a list of strings",
        lambda value: isinstance(value, list) and all(map(is_text, value)),
    )
)
LABELS = Kind(_expect_labels, as_long_as="tokens")
IMAGE = Kind(_expect_image)
ANY_IMAGE = Kind(
    lambda _: ("an image file", lambda value: isinstance(value, PIL.Image.Image)),
)
"""An image of any size, which will be scaled."""

INSTRUCTIONS: Columns = {"instruction": TEXT, "output": TEXT}
"""Columns of a template; a row may have an ``input`` in addition."""

PAIRS: tuple[Columns, ...] = (
    {"anchor": TEXT, "positive": TEXT, "negative": TEXT},
    {"anchor": TEXT, "positive": TEXT},
)
"""Alternatives for embeddings: texts that belong together, and perhaps one that does not."""
