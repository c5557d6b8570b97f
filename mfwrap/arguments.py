"""Checks of arguments, with one form of message."""

import inspect
import math
import sys

__all__ = [
    "check_bool",
    "check_positive_int",
    "check_positive_number",
    "described",
    "needed_arguments",
]


def described(value: object) -> str:
    """Return a value and its type for an error message."""
    return f"{value!r} of type {type(value).__name__}"


def check_bool(name: str, value: object) -> bool:
    """Return `value`, or raise ``TypeError`` if it is not a bool."""
    if not isinstance(value, bool):
        msg = f"`{name}` must be a bool, got {described(value)}"
        raise TypeError(msg)
    return value


def check_positive_int(name: str, value: object) -> int:
    """Return `value`; raise ``TypeError`` if it is not an int, ``ValueError`` if it is < 1."""
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"`{name}` must be an int, got {described(value)}"
        raise TypeError(msg)
    if value < 1:
        msg = f"`{name}` must be >= 1, got {value}"
        raise ValueError(msg)
    return value


def check_positive_number(name: str, value: object, *, finite: bool = False) -> float:
    """Return `value` as a float.

    Raises:
        TypeError: If `value` is not an int or float.
        ValueError: If it is nan or <= 0, or infinite where that is not allowed.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"`{name}` must be a number, got {described(value)}"
        raise TypeError(msg)
    # Not `float(value)` first: an int may be too large for any float.
    if not value > 0 or (finite and value > sys.float_info.max):
        msg = f"`{name}` must be > 0{' and finite' if finite else ''}, got {value}"
        raise ValueError(msg)
    return math.inf if value > sys.float_info.max else float(value)


def needed_arguments(owner: object, method: str) -> list[str]:
    """Return the names of the arguments without which a method cannot be called.

    As the class has it: what others put around it may hide or add some.
    """
    of_class = getattr(type(owner), method, None)
    signature = inspect.signature(of_class or getattr(owner, method))
    parameters = list(signature.parameters.values())[0 if of_class is None else 1 :]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]
