"""Checks of arguments with one form of message, and the caller whom a warning concerns."""

import inspect
import math
import os
import sys

__all__ = [
    "callers_stacklevel",
    "check_bool",
    "check_int",
    "check_positive_number",
    "described",
    "directory_name",
    "needed_arguments",
]


_LIBRARIES = frozenset({"mfwrap", "accelerate", "transformers", "torch", "contextlib"})


def described(value: object) -> str:
    """Return a value and its type for an error message."""
    return f"{value!r} of type {type(value).__name__}"


def check_bool(name: str, value: object) -> bool:
    """Return `value`, or raise ``TypeError`` if it is not a bool."""
    if not isinstance(value, bool):
        msg = f"`{name}` must be a bool, got {described(value)}"
        raise TypeError(msg)
    return value


def check_int(name: str, value: object, *, minimum: int = 1) -> int:
    """Return `value`; raise ``TypeError`` unless it is an int, ``ValueError`` below `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"`{name}` must be an int, got {described(value)}"
        raise TypeError(msg)
    if value < minimum:
        msg = f"`{name}` must be >= {minimum}, got {value}"
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


def callers_stacklevel() -> int:
    """Return the ``stacklevel`` with which a warning of the calling function names the user's line.

    That line is in the innermost frame outside mfwrap and outside the libraries that call mfwrap.
    """
    level, frame = 1, sys._getframe(1)  # noqa: SLF001  (inspect.stack() reads every source file)
    while frame.f_back is not None and _top_package(frame.f_globals) in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level


def _top_package(module_globals: dict[str, object]) -> str:
    return str(module_globals.get("__name__", "")).partition(".")[0]


def directory_name(name: str, value: object) -> str | None:
    """Return a path as a string, ``None`` as it is.

    Raises:
        TypeError: If `value` is neither.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, os.PathLike):
        msg = f"`{name}` must be a path or None, got {value!r} of type {type(value).__name__}"
        raise TypeError(msg)
    return str(value)
