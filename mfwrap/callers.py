"""Whom a warning is for."""

import sys

__all__ = ["callers_stacklevel"]

_LIBRARIES = frozenset({"mfwrap", "accelerate", "transformers", "torch", "contextlib"})


def callers_stacklevel() -> int:
    """Return the ``stacklevel`` that lets a warning of the calling function point at the user.

    That is the innermost frame outside of this library and of those that call it.
    """
    level, frame = 1, sys._getframe(1)  # noqa: SLF001  (no other way is as cheap)
    while frame.f_back is not None and _package(frame.f_globals) in _LIBRARIES:
        level, frame = level + 1, frame.f_back
    return level


def _package(names: dict[str, object]) -> str:
    return str(names.get("__name__", "")).partition(".")[0]
