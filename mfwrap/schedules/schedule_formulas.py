"""Parts that the formulas of several schedules are made of."""

import math
from typing import Any

from mfwrap.schedules.formula import check_steps, steps_of

__all__ = ["between", "end_of_cosine", "half_wave", "progress", "run_length"]


def between(lowest: float, highest: Any, part: float) -> Any:
    """Return what lies a part of the way from `lowest` to `highest`."""
    return lowest + (highest - lowest) * part


def half_wave(halves: float) -> float:
    """Return a cosine between 1 at 0 and 0 at 1."""
    return 0.5 * (1 + math.cos(math.pi * halves))


def progress(step: int, begins: int, ends: int) -> float:
    """Return the part of the way from one step to another."""
    return (step - begins) / max(1, ends - begins)


def run_length(total_steps: int | None) -> int:
    """Return `total_steps`.

    Raises:
        TypeError: If it is not an int.
        ValueError: If it is ``None`` or < 1.
    """
    if total_steps is None:
        msg = "`total_steps` must be given, got None"
        raise ValueError(msg)
    return check_steps("total_steps", total_steps, at_least=1)


def end_of_cosine(decay_steps: int | None, decay_ratio: float | None, total_steps: int) -> int:
    """Return the step from which on a cosine is over: not after the run, when it would rise again.

    Raises:
        TypeError: As `steps_of`.
        ValueError: As `steps_of`.
    """
    ends = steps_of("decay", decay_steps, decay_ratio, total_steps)
    return total_steps if ends is None else min(ends, total_steps)
