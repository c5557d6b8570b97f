"""Define colors and number formats, and shorten curves, for the run page and the picture."""

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from mfwrap.records.run_record import Curve, RunRecord

# These colors are distinguishable on white and on near-black, also with color blindness.
COLORS = ("#3b7dd8", "#d9822b", "#2a9d74", "#b45bb5", "#c94f4f", "#7d8b99")

NOT_FINITE_COLOR = "#c0392b"
"""Color that marks NaN, infinity and overflow."""

NUMBER = ".5g"
"""Format of every number that is written out."""

_MAX_POINTS = 2000
_MAX_COLUMNS = 800


def thinned(curve: Curve, max_points: int = _MAX_POINTS) -> Curve:
    """Shorten a curve to about `max_points` points; keep the extremes of each stretch of steps.

    Args:
        curve: Curve of any length. It is returned unchanged if it has at most `max_points` points.
        max_points: Approximate number of finite points. All non-finite points are kept in addition.
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
    """Return a curve of moving means over the finite values among the nearest 3% of points."""
    finite = [value if math.isfinite(value) else 0.0 for value in curve.values]
    sums = [0.0, *accumulate(finite)]
    counts = [0, *accumulate(int(math.isfinite(value)) for value in curve.values)]
    reach = max(1, round(0.015 * len(finite)))
    values = []
    for index in range(len(finite)):
        # Keep the window symmetric: near an end it shrinks on both sides. A one-sided window would
        # pull the end of the curve towards its middle.
        near = min(reach, index, len(finite) - 1 - index)
        start, end = index - near, index + near + 1
        count = counts[end] - counts[start]
        values.append((sums[end] - sums[start]) / count if count else math.nan)
    return Curve(curve.steps, values)


def with_gaps(values: Sequence[float]) -> list[float | None]:
    """Replace each non-finite value with ``None``, which plotly shows as a gap."""
    return [value if math.isfinite(value) else None for value in values]


def binned(groups: Mapping[str, Curve]) -> tuple[list[int], list[list[float | None]]]:
    """Reduce norms of many steps to at most 800 columns.

    Args:
        groups: Curves by group name, at least one.

    Returns:
        The first step of each column; and a row for each group. A row holds the group's largest
        finite norm in each column, or ``None`` if the group has no finite norm there.
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
    """Return the steps that overflowed; use the overflow count if the run has no flag per step."""
    if curve := run.curves.get("overflow"):
        return [step for step, value in zip(curve.steps, curve.values, strict=True) if value]
    curve = run.curves.get("overflows", Curve())
    counted = pairwise([(0, 0.0), *zip(curve.steps, curve.values, strict=True)])
    return [step for (_, before), (step, count) in counted if count > before]
