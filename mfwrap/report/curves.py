"""Define colors and number formats, and shorten curves, for the run page and the picture."""

import math
from collections.abc import Mapping
from itertools import pairwise

from mfwrap.records.run_record import Curve, RunRecord

# These colors are distinguishable on white and on near-black, also with color blindness.
COLORS = ("#3b7dd8", "#d9822b", "#2a9d74", "#b45bb5", "#c94f4f", "#7d8b99")

NOT_FINITE_COLOR = "#c0392b"
"""Color that marks NaN, infinity and overflow."""

NUMBER = ".5g"
"""Format of every number that is written out."""

_MAX_POINTS = 2000
_MAX_COLUMNS = 800

_SMOOTHING = 0.03
"""Share of the points that a moving mean takes in: what page.js calls medium, its default."""


def thinned(curve: Curve, max_points: int = _MAX_POINTS) -> Curve:
    """Shorten a curve to about `max_points` points; keep the extremes of each stretch of steps.

    Args:
        curve: Curve of any length. It is returned unchanged if it has at most `max_points` points.
        max_points: Approximate number of finite points. The first of the non-finite points in each
            stretch is kept in addition.
    """
    if len(curve.steps) <= max_points:
        return curve
    width = math.ceil(len(curve.steps) / (max_points // 2))
    kept: set[int] = {0, len(curve.steps) - 1}
    for start in range(0, len(curve.steps), width):
        stretch = range(start, min(start + width, len(curve.steps)))
        finite = [i for i in stretch if math.isfinite(curve.values[i])]
        kept.update([i for i in stretch if not math.isfinite(curve.values[i])][:1])
        if finite:
            kept.add(min(finite, key=curve.values.__getitem__))
            kept.add(max(finite, key=curve.values.__getitem__))
    order = sorted(kept)
    return Curve([curve.steps[i] for i in order], [curve.values[i] for i in order])


def to_smooth(curve: Curve) -> Curve:
    """Return the points whose moving means are drawn: the curve, or `means` of a long one.

    Moving means over what `thinned` keeps would be means over extremes.
    """
    return means(curve) if len(curve.steps) > _MAX_POINTS else curve


def smoothed(curve: Curve) -> Curve:
    """Return moving means over the finite values among the nearest 3% of points.

    page.js does the same in the browser, so the picture and the page of a run show the same line.

    Args:
        curve: Curve of any length; `to_smooth` shortens a long one.
    """
    curve = to_smooth(curve)
    # Round halves up, as JavaScript does.
    reach = max(1, math.floor(_SMOOTHING * len(curve.values) / 2 + 0.5))
    values = []
    for index in range(len(curve.values)):
        # Keep the window symmetric: near an end it shrinks on both sides. A one-sided window would
        # pull the end of the curve towards its middle.
        near = min(reach, index, len(curve.values) - 1 - index)
        # Not by differences of running sums: after a loss of 1e30 they have no digit left.
        window = list(filter(math.isfinite, curve.values[index - near : index + near + 1]))
        values.append(sum(window) / len(window) if window else math.nan)
    return Curve(curve.steps, values)


def means(curve: Curve, max_points: int = _MAX_POINTS) -> Curve:
    """Return means of the finite values in equal stretches of a curve, at their middle steps.

    Args:
        curve: Curve of any length.
        max_points: Largest number of stretches. A stretch without a finite value is left out.
    """
    width = math.ceil(len(curve.steps) / max_points)
    found = Curve()
    for start in range(0, len(curve.steps), width):
        finite = [value for value in curve.values[start : start + width] if math.isfinite(value)]
        if finite:
            found.steps.append(curve.steps[min(start + width // 2, len(curve.steps) - 1)])
            found.values.append(math.fsum(finite) / len(finite))
    return found


def binned(
    groups: Mapping[str, Curve], max_columns: int = _MAX_COLUMNS
) -> tuple[list[int], list[list[float | None]]]:
    """Reduce norms of many steps to some columns.

    Args:
        groups: Curves by group name, at least one.
        max_columns: Largest number of columns.

    Returns:
        The first step of each column; and a row for each group. A row holds the group's largest
        value in each column, NaN if a value there is not finite, or ``None`` if there is none.
    """
    steps = sorted({step for curve in groups.values() for step in curve.steps})
    width = math.ceil(len(steps) / max_columns)
    column = {step: index // width for index, step in enumerate(steps)}
    norms: list[list[float | None]] = []
    for curve in groups.values():
        row: list[float | None] = [None] * math.ceil(len(steps) / width)
        for step, value in zip(curve.steps, curve.values, strict=True):
            before = row[column[step]]
            if not math.isfinite(value):
                row[column[step]] = math.nan
            elif before is None or before < value:
                row[column[step]] = value
        norms.append(row)
    return steps[::width], norms


def overflow_steps(run: RunRecord) -> list[int]:
    """Return the steps that overflowed; use the overflow count if the run has no flag per step."""
    if curve := run.curves.get("overflow"):
        return [step for step, value in zip(curve.steps, curve.values, strict=True) if value]
    curve = run.curves.get("overflows", Curve())
    counted = pairwise([(0, 0.0), *zip(curve.steps, curve.values, strict=True)])
    return [step for (_, before), (step, count) in counted if count > before]
