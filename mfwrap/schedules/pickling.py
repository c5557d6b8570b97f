"""Pickle an object, whose class was changed in place, as an object of its earlier class."""

from collections.abc import Collection
from typing import Any


def pickled_as(
    kind: type, instance: Any, *, without: Collection[str] = (), **values: Any
) -> tuple[Any, ...]:
    """Return what ``instance.__reduce_ex__`` must return so that it pickles as a plain `kind`.

    The pickle refers to `kind` by name and to nothing of mfwrap, so a process that has not
    imported mfwrap can load it. ``copy.copy`` and ``copy.deepcopy`` use it, too.

    Args:
        kind: Class of the unpickled object; a class from which the instance's class is derived.
        instance: Object to pickle. Its ``__getstate__`` and the ``__setstate__`` of `kind` are
            respected.
        without: Names of attributes to leave out.
        values: Attributes that have another value in the unpickled object.
    """
    state = instance.__getstate__()
    if isinstance(state, dict):
        state = {name: value for name, value in (state | values).items() if name not in without}
    return object.__new__, (kind,), state
