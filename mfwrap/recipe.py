"""The former name of `mfwrap.runner`, for one release."""

import warnings
from typing import Any

from mfwrap import runner

__all__ = [*runner.__all__]  # noqa: PLE0604  (ruff does not read the list of another module)


def __getattr__(name: str) -> Any:
    if name not in runner.__all__:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    warnings.warn(
        f"mfwrap.recipe is mfwrap.runner now: write `from mfwrap.runner import {name}`",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(runner, name)
