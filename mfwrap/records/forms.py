"""Forms of the values in records, which a crash, a person or another program may have changed."""

from collections.abc import Mapping
from typing import Any, TypeAlias

Form: TypeAlias = type | list[Any] | Mapping[str, Any]
"""A class; a list with the form of each item; or the forms of values that a mapping must have.
``float`` stands for every number, also one that is written as ``"nan"``, ``"inf"`` or ``"-inf"``;
``int`` for an integer that is no bool."""


def fitting(record: Mapping[str, Any], forms: Mapping[str, Form]) -> dict[str, Any]:
    """Return a record without the values that have another form than expected.

    Args:
        record: The record.
        forms: Forms by name; any other value may have any form.
    """
    return {
        name: value
        for name, value in record.items()
        if name not in forms or fits(value, forms[name])
    }


def fits(value: Any, form: Form) -> bool:
    """Return whether a value has a form."""
    if isinstance(form, list):
        return isinstance(value, list) and all(fits(item, form[0]) for item in value)
    if isinstance(form, Mapping):
        return isinstance(value, Mapping) and all(
            name in value and fits(value[name], each) for name, each in form.items()
        )
    if form is float:
        return to_number(value) is not None
    return type(value) is int if form is int else isinstance(value, form)


def to_number(value: Any) -> float | None:
    """Return a number as a float; ``None`` for anything else.

    The strings ``"nan"``, ``"inf"`` and ``"-inf"`` are numbers, too, because `JsonLines` writes
    non-finite numbers as strings.
    """
    if isinstance(value, (bool, int, float)) or value in ("nan", "inf", "-inf"):
        return float(value)
    return None
