"""Check arguments with uniform error messages, and find the user's line for a warning."""

import inspect
import math
import numbers
import os
import sys
from collections.abc import Callable, Collection
from typing import Any, cast


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
    """Return `value` if it is an int of at least `minimum`.

    Raises:
        TypeError: If `value` is not an int, or is a bool.
        ValueError: If `value` is below `minimum`.
    """
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"`{name}` must be an int, got {described(value)}"
        raise TypeError(msg)
    if value < minimum:
        msg = f"`{name}` must be >= {minimum}, got {value}"
        raise ValueError(msg)
    return value


def check_callable(name: str, value: object) -> None:
    """Raise ``TypeError`` if `value` cannot be called."""
    if not callable(value):
        msg = f"`{name}` must be callable, got {described(value)}"
        raise TypeError(msg)


def takes(function: Callable[..., Any], name: str) -> bool:
    """Return whether a function takes a keyword; true if its signature is unknown."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return True
    return name in parameters and parameters[name].kind is not inspect.Parameter.POSITIONAL_ONLY


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Raise ``ValueError`` if `value` is not one of `choices`."""
    if value not in choices:
        msg = f"`{name}` must be one of {list(choices)}, got {value!r}"
        raise ValueError(msg)


def check_real(name: str, value: object) -> float:
    """Return `value`, or raise ``TypeError`` if it is a bool or not a real number."""
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        msg = f"`{name}` must be a number, got {described(value)}"
        raise TypeError(msg)
    return cast("float", value)  # mypy: `numbers.Real` has no comparison with floats


def check_number(name: str, value: object, *, minimum: float = 0) -> float:
    """Return `value` as a float if it is finite and at least `minimum`.

    Raises:
        TypeError: If `value` is not a number.
        ValueError: If `value` is nan, infinite or below `minimum`.
    """
    number = check_real(name, value)
    if not minimum <= number <= sys.float_info.max:
        msg = f"`{name}` must be >= {minimum} and finite, got {value}"
        raise ValueError(msg)
    return float(number)


def check_positive_number(name: str, value: object, *, finite: bool = False) -> float:
    """Return `value` as a float if it is > 0.

    Raises:
        TypeError: If `value` is not a number.
        ValueError: If `value` is nan or <= 0, or if it is infinite and `finite` is True.
    """
    number = check_real(name, value)
    # Compare before converting: `float` raises OverflowError for an int that no float can hold.
    if not number > 0 or (finite and number > sys.float_info.max):
        msg = f"`{name}` must be > 0{' and finite' if finite else ''}, got {value}"
        raise ValueError(msg)
    return math.inf if number > sys.float_info.max else float(number)


def directory_name(name: str, value: object) -> str | None:
    """Return a path as a string; ``None`` stays ``None``.

    Raises:
        TypeError: If `value` is neither a path nor ``None``.
    """
    if value is None or isinstance(value, str):
        return value
    if not isinstance(value, os.PathLike):
        msg = f"`{name}` must be a path or None, got {described(value)}"
        raise TypeError(msg)
    return str(value)


def needed_arguments(owner: object, method: str) -> list[str]:
    """Return the names of the arguments that a method requires.

    The signature is read from the class of `owner`. An instance may have an attribute of the same
    name with another signature, such as a wrapper that a library has put around the method.
    """
    of_class = getattr(type(owner), method, None)
    signature = inspect.signature(of_class or getattr(owner, method))
    parameters = list(signature.parameters.values())[0 if of_class is None else 1 :]
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in variadic]


_LIBRARIES = frozenset({"mfwrap", "accelerate", "transformers", "torch", "contextlib"})


def callers_stacklevel() -> int:
    """Return the ``stacklevel`` that makes a warning name the user's line of code.

    Call it in the function that warns. The user's line is in the innermost frame outside mfwrap and
    outside the libraries that call mfwrap.
    """
    level, frame = 1, sys._getframe(1)  # noqa: SLF001  (inspect.stack() reads every source file)
    while frame.f_back is not None and _top_package(frame.f_globals) in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level


def _top_package(module_globals: dict[str, object]) -> str:
    return str(module_globals.get("__name__", "")).partition(".")[0]
