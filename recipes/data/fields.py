"""The types of the columns of tables (CSV), which follow from all of their fields."""

import re
from collections.abc import Collection, Sequence
from typing import final

from datasets import Features, Value

_WHOLE = re.compile(r"\s*[+-]?\d{1,18}\s*", re.ASCII)
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*", re.ASCII)
_BOOLS = frozenset({"True", "TRUE", "true", "False", "FALSE", "false"})


@final
class ColumnTypes:
    """Find the type of each column of a table: bool, int64, float64 or string.

    An empty field is null and has no type. A column with fields of several types is a string,
    except that whole numbers among other numbers are floats.

    The library `datasets` would take the types from the first 10,000 rows, and raise an error that
    names neither the line nor the value if a later row has another type.

    Args:
        texts: Columns that are strings, whatever their fields look like.
    """

    def __init__(self, texts: Collection[str]) -> None:
        self._types = dict.fromkeys(texts, "string")
        self._with_nulls: set[str] = set()

    def add(self, names: Sequence[str], fields: Sequence[str]) -> None:
        """Take the fields of a row into account.

        Args:
            names: Names of the columns.
            fields: Fields of the row.
        """
        for name, field in zip(names, fields, strict=True):
            former = self._types.get(name)
            if former == "string":
                continue
            if field:
                self._types[name] = _common(former, _type(field))
            else:
                self._with_nulls.add(name)

    def features(self, names: Sequence[str]) -> Features:
        """Return the types of columns, as `datasets` takes them."""
        return Features({name: Value(self._stored(name)) for name in names})

    @property
    def texts(self) -> frozenset[str]:
        """Names of the columns that are strings."""
        return frozenset(name for name, found in self._types.items() if found == "string")

    def _stored(self, name: str) -> str:
        """Return the type of a column; pandas has no null among integers and bools."""
        found = self._types.get(name, "float64")
        if name not in self._with_nulls:
            return found
        return {"int64": "float64", "bool": "string"}.get(found, found)


def is_number(value: object) -> bool:
    """Return whether a value is a text that a table would have as a number."""
    return isinstance(value, str) and _NUMBER.fullmatch(value) is not None


def _type(field: str) -> str:
    if _WHOLE.fullmatch(field):
        return "int64"
    if _NUMBER.fullmatch(field):
        return "float64"
    return "bool" if field in _BOOLS else "string"


def _common(former: str | None, found: str) -> str:
    """Return the type of a column that has had fields of one type and gets one of another."""
    if former is None or former == found:
        return found
    return "float64" if {former, found} == {"int64", "float64"} else "string"
