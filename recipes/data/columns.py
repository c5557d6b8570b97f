"""Whether the rows of a user's data hold what a task takes; where not, the row is named."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, final

from datasets import Dataset, Value

from mfwrap.recipes.data.source import DataError

__all__ = [
    "check_image_labels",
    "check_labelled_texts",
    "check_labelled_words",
    "check_numbers",
    "check_preferences",
    "check_texts",
    "check_tuning",
    "tuning_columns",
]

Names = Mapping[str, str]
"""The data's names of columns by those of the task, where they differ."""


@final
@dataclass(frozen=True)
class _Kind:
    expect: Callable[[Any], tuple[str, Callable[[Any], bool]]]
    """Of the first row's value: what each row must have, and whether a value is that."""

    dtypes: str = r"(?!)"
    """Pattern of arrow's types that hold nothing else, but for null; by default of none."""


def check_texts(rows: Dataset, names: Names) -> None:
    """Refuse a ``text`` that is no string.

    Raises:
        DataError: With the column, the row, and what it holds; so do all of these functions.
    """
    _check(rows, names, "text", _TEXT)


def check_labelled_texts(rows: Dataset, names: Names) -> None:
    """Refuse a ``text`` that is no string, and a ``label`` of another kind than the first."""
    _check(rows, names, "text", _TEXT)
    _check(rows, names, "label", _LABEL)


def check_labelled_words(rows: Dataset, names: Names) -> None:
    """Refuse ``tokens`` that are no strings, and ``labels`` that are not one for each of them."""
    _check(rows, names, "tokens", _WORDS)
    _check(rows, names, "labels", _LABELS)
    for number, (words, labels) in enumerate(zip(rows["tokens"], rows["labels"], strict=True), 1):
        if len(words) != len(labels):
            wanted = f"as many values as `{names.get('tokens', 'tokens')}`, {len(words)},"
            raise _error(names, "labels", wanted, labels, number)


def check_image_labels(rows: Dataset, names: Names) -> None:
    """Refuse a ``label`` of another kind than the first; images are read one by one, later."""
    _check(rows, names, "label", _LABEL)


def check_numbers(rows: Dataset, names: Names) -> None:
    """Refuse ``features`` that are not as many numbers in each row, and another ``target``."""
    _check(rows, names, "features", _NUMBERS)
    _check(rows, names, "target", _NUMBER)


def check_tuning(rows: Dataset, names: Names) -> None:
    """Refuse what is neither a string nor a list of messages."""
    for column in tuning_columns(rows):
        kind = {"messages": _MESSAGES, "text": _TEXT}.get(column, _TURN)
        _check(rows, names, column, kind)


def check_preferences(rows: Dataset, names: Names) -> None:
    """Refuse a prompt or an answer that is neither a string nor a list of messages."""
    for column in ("prompt", "chosen", "rejected"):
        if column in rows.column_names:
            _check(rows, names, column, _TURN)


def tuning_columns(rows: Dataset) -> list[str]:
    """Return the columns that supervised tuning takes: of several kinds, the first."""
    if "messages" in rows.column_names:
        return ["messages"]
    pair = ["prompt", "completion"]
    return pair if set(pair) <= set(rows.column_names) else ["text"]


def _check(rows: Dataset, names: Names, column: str, kind: _Kind) -> None:
    if not len(rows) or _is_clean(rows, column, kind.dtypes):
        return
    first = next(_values(rows, column))
    wanted, fits = kind.expect(first)
    for number, value in enumerate(_values(rows, column), start=1):
        if not fits(value):
            raise _error(names, column, wanted, value, number)


def _error(names: Names, column: str, wanted: str, value: Any, number: int) -> DataError:
    name = names.get(column, column)
    got = f"{value!r:.60} in row {number} (the first is row 1)"
    return DataError(f"`data` must have {wanted} in each row of `{name}`, got {got}")


def _is_clean(rows: Dataset, column: str, dtypes: str) -> bool:
    """Return whether a column's type says all, so that no row need be looked at."""
    feature = rows.features[column]
    if not isinstance(feature, Value) or re.fullmatch(dtypes, feature.dtype) is None:
        return False
    values = rows.data.column(column)
    try:
        values.validate(full=True)
    except ValueError:  # arrow's: bytes that are no UTF-8
        return False
    return bool(values.null_count == 0)


def _values(rows: Dataset, column: str) -> Iterator[Any]:
    values = iter(rows.with_format(None)[column])
    while True:
        try:
            yield next(values)
        except StopIteration:
            return
        except UnicodeDecodeError as error:
            yield error.object  # fits nothing


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float))


def _expect_label(first: Any) -> tuple[str, Callable[[Any], bool]]:
    if _is_text(first):
        return f"a string, like {first!r:.40} in row 1,", _is_text
    if _is_number(first):
        return f"a number, like {first!r} in row 1,", _is_number
    return "a string or a number", lambda _: False


def _expect_labels(first: Any) -> tuple[str, Callable[[Any], bool]]:
    kinds = [_is_text, _is_number]
    if isinstance(first, list) and first:
        kinds = [kind for kind in kinds if kind(first[0])]

    def fits(value: Any) -> bool:
        return isinstance(value, list) and any(all(map(kind, value)) for kind in kinds)

    return "a list of strings alone, or of numbers alone,", fits


def _expect_numbers(first: Any) -> tuple[str, Callable[[Any], bool]]:
    def are_numbers(value: Any) -> bool:
        return isinstance(value, list) and bool(value) and all(map(_is_number, value))

    if not are_numbers(first):
        return "a list of numbers", are_numbers
    wanted = f"a list of {len(first)} numbers, as row 1 has,"
    return wanted, lambda value: are_numbers(value) and len(value) == len(first)


def _expect_turn(first: Any) -> tuple[str, Callable[[Any], bool]]:
    if _is_text(first):
        return "a string, as row 1 has,", _is_text
    if isinstance(first, list):
        return "a list of messages, as row 1 has,", lambda value: isinstance(value, list)
    return "a string or a list of messages", lambda _: False


_STRINGS = "(large_)?string"
_NUMERIC = r"u?int\d+|float\d+|bool"
_TEXT = _Kind(lambda _: ("a string", _is_text), _STRINGS)
_LABEL = _Kind(_expect_label, f"{_STRINGS}|{_NUMERIC}")
_NUMBER = _Kind(lambda _: ("a number", _is_number), _NUMERIC)
_NUMBERS = _Kind(_expect_numbers)
_LABELS = _Kind(_expect_labels)
_WORDS = _Kind(
    lambda _: (
        "a list of strings",
        lambda value: isinstance(value, list) and all(map(_is_text, value)),
    )
)
_TURN = _Kind(_expect_turn, _STRINGS)
_MESSAGES = _Kind(lambda _: ("a list of messages", lambda value: isinstance(value, list)))
