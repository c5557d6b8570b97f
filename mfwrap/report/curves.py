"""What the run page and the picture share: how curves are reduced, and colors and formats."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from mfwrap.records.run_record import Curve, RunRecord

# Distinguishable on white and on near-black, also with color blindness.
COLORS = ("#3b7dd8", "#d9822b", "#2a9d74", "#b45bb5", "#c94f4f", "#7d8b99")

NOT_FINITE_COLOR = "#c0392b"
"""Marks NaN, infinity and overflow."""

NUMBER = ".5g"
"""Format of every number that is written out."""

_MAX_POINTS = 2000
_MAX_COLUMNS = 800


def thinned(curve: Curve, max_points: int = _MAX_POINTS) -> Curve:
    """Return a curve of fewer points that keeps the lowest and highest value of each stretch.

    Args:
        curve: Curve of any length.
        max_points: Limit of the number of points. Non-finite values are kept in addition.
    """
    if len(curve.steps) <= max_points:
        return curve
    width = math.ceil(len(curve.steps) / (max_points // 2))
    kept: set[int] = {0, len(curve.steps) - 1}
    for start in range(0, len(curve.steps), width):
        stretch = range(start, min(start + width, len(curve.steps)))
        finite = [i for i in stretch if math.isfinite(curve.values[i])]
        kept.update(i for i in stretch if not math.isfinite(curve.values[i]))
        if finite:
            kept.add(min(finite, key=curve.values.__getitem__))
            kept.add(max(finite, key=curve.values.__getitem__))
    order = sorted(kept)
    return Curve([curve.steps[i] for i in order], [curve.values[i] for i in order])


def smoothed(curve: Curve) -> Curve:
    """Return the mean over the nearest 3% of the points, without non-finite values."""
    finite = [value if math.isfinite(value) else 0.0 for value in curve.values]
    sums = [0.0, *accumulate(finite)]
    counts = [0, *accumulate(int(math.isfinite(value)) for value in curve.values)]
    reach = max(1, round(0.015 * len(finite)))
    values = []
    for index in range(len(finite)):
        # The window is equally wide on both sides. Near an end it shrinks on both, because a
        # one-sided window would pull the ends towards the middle.
        near = min(reach, index, len(finite) - 1 - index)
        start, end = index - near, index + near + 1
        count = counts[end] - counts[start]
        values.append((sums[end] - sums[start]) / count if count else math.nan)
    return Curve(curve.steps, values)


def with_gaps(values: Sequence[float]) -> list[float | None]:
    """Return values with ``None`` for each non-finite one."""
    return [value if math.isfinite(value) else None for value in values]


def binned(groups: Mapping[str, Curve]) -> tuple[list[int], list[list[float | None]]]:
    """Reduce norms of many steps to at most 800 columns.

    Args:
        groups: Curves by group name, at least one.

    Returns:
        The first step of each column, and for each group a row with the largest finite norm of
        each column; ``None`` where there is none.
    """
    steps = sorted({step for curve in groups.values() for step in curve.steps})
    width = math.ceil(len(steps) / _MAX_COLUMNS)
    column = {step: index // width for index, step in enumerate(steps)}
    norms: list[list[float | None]] = []
    for curve in groups.values():
        row: list[float | None] = [None] * math.ceil(len(steps) / width)
        for step, value in zip(curve.steps, curve.values, strict=True):
            before = row[column[step]]
            if math.isfinite(value):
                row[column[step]] = value if before is None else max(before, value)
        norms.append(row)
    return steps[::width], norms


def overflow_steps(run: RunRecord) -> list[int]:
    """Return the steps that overflowed, or at which the recorded count of overflows had risen."""
    if curve := run.curves.get("overflow"):
        return [step for step, value in zip(curve.steps, curve.values, strict=True) if value]
    curve = run.curves.get("overflows", Curve())
    counted = pairwise([(0, 0.0), *zip(curve.steps, curve.values, strict=True)])
    return [step for (_, before), (step, count) in counted if count > before]
