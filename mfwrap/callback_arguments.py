"""Checks of the callbacks' arguments, with one form of message."""

import math

__all__ = ["check_bool", "check_int", "check_positive_number"]


def check_bool(name: str, value: object) -> None:
    """Raise ``TypeError`` if `value` is not a bool."""
    if not isinstance(value, bool):
        msg = f"`{name}` must be a bool, got {_described(value)}"
        raise TypeError(msg)


def check_int(name: str, value: object, *, minimum: int) -> None:
    """Raise ``TypeError`` if `value` is not an int, ``ValueError`` if it is below `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"`{name}` must be an int, got {_described(value)}"
        raise TypeError(msg)
    if value < minimum:
        msg = f"`{name}` must be >= {minimum}, got {value}"
        raise ValueError(msg)


def check_positive_number(name: str, value: object) -> None:
    """Raise ``TypeError`` if `value` is not a number, ``ValueError`` if not in (0, inf)."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"`{name}` must be a number, got {_described(value)}"
        raise TypeError(msg)
    if not 0 < value < math.inf:
        msg = f"`{name}` must be > 0 and finite, got {value}"
        raise ValueError(msg)


def _described(value: object) -> str:
    return f"{value!r} of type {type(value).__name__}"
