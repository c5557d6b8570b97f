"""Set attributes of an object for the length of a block."""

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def replaced(target: object, **values: Any) -> Iterator[None]:
    """Set attributes of an object within the block, and restore their values afterwards."""
    before = {name: getattr(target, name) for name in values}
    for name, value in values.items():
        setattr(target, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)
