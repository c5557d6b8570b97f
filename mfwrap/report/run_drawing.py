"""What the panels of a run page are drawn with."""

import html
import math
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import plotly.graph_objects as go

from mfwrap.records.run_record import Curve, RunRecord

__all__ = ["Panel", "color_of", "finite", "label", "line", "points", "smoothed", "thinned"]

# Told apart on white and on near-black, also by those who see few colours.
_COLORS = ("#3b7dd8", "#d9822b", "#2a9d74", "#b45bb5", "#c94f4f", "#7d8b99")
_MAX_POINTS = 2000


class Panel(NamedTuple):
    """A figure with what it shows in words."""

    name: str
    """Its identifier in the page."""

    title: str
    note: str
    figure: go.Figure
    has_steps: bool = True
    """Whether its horizontal axis is that of steps."""


def thinned(curve: Curve, max_points: int = _MAX_POINTS) -> Curve:
    """Return a curve of few points that has the lowest and the highest of each stretch.

    Args:
        curve: Of any length.
        max_points: How many points there may be; what is not finite is kept beyond them.
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
    """Return the mean over the nearest 3% of the points, passing over what is not finite."""
    finite = [value if math.isfinite(value) else 0.0 for value in curve.values]
    sums = [0.0, *accumulate(finite)]
    counts = [0, *accumulate(int(math.isfinite(value)) for value in curve.values)]
    reach = max(1, round(0.015 * len(finite)))
    values = []
    for index in range(len(finite)):
        # As far on both sides, so that the ends are not drawn towards the middle.
        near = min(reach, index, len(finite) - 1 - index)
        start, end = index - near, index + near + 1
        count = counts[end] - counts[start]
        values.append((sums[end] - sums[start]) / count if count else math.nan)
    return Curve(curve.steps, values)


def color_of(number: int) -> str:
    """Return the colour of a run."""
    return _COLORS[number % len(_COLORS)]


def finite(values: Sequence[float]) -> list[float | None]:
    """Return values with a gap for each that is not finite."""
    return [value if math.isfinite(value) else None for value in values]


def label(run: RunRecord, what: str, runs: Sequence[RunRecord]) -> str:
    """Return what a trace is called: with its run, if there are several."""
    return html.escape(f"{run.name}: {what}" if len(runs) > 1 else what)


def line(curve: Curve, name: str, color: str, **settings: Any) -> go.Scatter:
    """Return a curve as a line, thinned."""
    shown = thinned(curve)
    return go.Scatter(
        x=shown.steps,
        y=finite(shown.values),
        name=name,
        mode="lines" if len(shown.steps) > 1 else "markers",
        line={"color": color, "width": 2} | settings.pop("line", {}),
        hovertemplate="step %{x}: %{y:.5g}<extra>%{fullData.name}</extra>",
        **settings,
    )


def points(steps: Sequence[int], values: Sequence[Any], name: str, **marker: Any) -> go.Scatter:
    """Return marks at some steps."""
    return go.Scatter(
        x=list(steps),
        y=list(values),
        name=name,
        mode="markers",
        marker={"size": 9} | marker,
        hovertemplate="step %{x}: %{y:.5g}<extra>%{fullData.name}</extra>",
    )
