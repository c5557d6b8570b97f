"""Maps of local norms: layer by step, and layer by rank."""

import html
import math
from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any, NamedTuple

import plotly.graph_objects as go

from mfwrap.records.run_record import Curve, RunRecord

__all__ = [
    "Panel",
    "color_of",
    "finite",
    "label",
    "line",
    "norms_by_rank",
    "norms_by_step",
    "points",
    "smoothed",
    "thinned",
]


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


_MAX_COLUMNS = 800
_MAX_SLIDER_STEPS = 60


def norms_by_step(runs: Sequence[RunRecord]) -> list[Panel]:
    """Return the panel of layer by step, for one run and rank at a time; none without norms."""
    figure = go.Figure()
    names: list[str] = []
    for run in runs:
        for rank, groups in run.local_norms.items():
            steps, norms = _binned(groups)
            figure.add_trace(_heatmap(norms, steps, [html.escape(name) for name in groups], "step"))
            figure.data[-1].visible = not names
            names.append(label(run, f"rank {rank}", runs))
    if not names:
        return []
    _add_choice(figure, names)
    rows = max(len(groups) for run in runs for groups in run.local_norms.values())
    figure.update_layout(height=max(280, min(1400, 120 + 18 * rows)))
    figure.update_yaxes(autorange="reversed", tickfont_size=10)
    note = (
        "L2 norm of each group of this rank's own gradients, before they are reduced. Of many "
        "steps in one column the largest norm is shown; a gap is not finite, or zero."
    )
    return [Panel("local-norms", "Local norms by layer and step", note, figure)]


def norms_by_rank(runs: Sequence[RunRecord]) -> list[Panel]:
    """Return a panel for each run on several ranks: layer by rank, with a slider over steps."""
    panels = []
    for number, run in enumerate(runs):
        if len(run.local_norms) < 2:
            continue
        names = list(next(iter(run.local_norms.values())))
        steps = sorted({s for g in run.local_norms.values() for c in g.values() for s in c.steps})
        # From the end, so that the last step is there.
        steps = steps[:: -math.ceil(len(steps) / _MAX_SLIDER_STEPS)][::-1]
        ranks = [f"rank {rank}" for rank in run.local_norms]
        figure = go.Figure()
        for step in steps:
            norms = [[_at(g.get(name), step) for g in run.local_norms.values()] for name in names]
            figure.add_trace(_heatmap(norms, ranks, list(map(html.escape, names)), "on"))
            figure.data[-1].visible = step == steps[-1]
        _add_slider(figure, steps)
        figure.update_yaxes(autorange="reversed", tickfont_size=10)
        figure.update_layout(height=max(320, min(1400, 180 + 18 * len(names))))
        title = label(run, "Local norms by layer and rank", runs)
        note = "Of one step, which the slider chooses."
        panels.append(Panel(f"ranks-{number}", title, note, figure, has_steps=False))
    return panels


def _heatmap(z: list[list[float | None]], x: Sequence[Any], y: Sequence[str], what: str) -> Any:
    """Return a map of norms with a logarithmic colour scale."""
    logs = [[math.log10(v) if v else None for v in row] for row in z]
    known = [v for v in chain.from_iterable(logs) if v is not None]
    low, high = math.floor(min(known, default=0)), math.ceil(max(known, default=1))
    ticks = list(range(low, max(high, low + 1) + 1))
    return go.Heatmap(
        z=logs,
        x=list(x),
        y=list(y),
        customdata=z,
        colorscale="Viridis",
        colorbar={
            "title": "L2 norm",
            "tickvals": ticks,
            "ticktext": [f"1e{tick}" for tick in ticks],
            "thickness": 12,
        },
        hovertemplate=f"%{{y}}<br>{what} %{{x}}<br>norm %{{customdata:.4g}}<extra></extra>",
        hoverongaps=False,
    )


def _binned(groups: dict[str, Curve]) -> tuple[list[int], list[list[float | None]]]:
    """Return the first steps of columns and each group's largest finite norm in them."""
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


def _at(curve: Curve | None, step: int) -> float | None:
    if curve is None or step not in curve.steps:
        return None
    value = curve.values[curve.steps.index(step)]
    return value if math.isfinite(value) else None


def _add_slider(figure: go.Figure, steps: Sequence[int]) -> None:
    figure.update_layout(
        sliders=[
            {
                "active": len(steps) - 1,
                "currentvalue": {"prefix": "step "},
                "steps": [
                    {
                        "label": str(step),
                        "method": "update",
                        "args": [{"visible": [other == step for other in steps]}],
                    }
                    for step in steps
                ],
            }
        ]
    )


def _add_choice(figure: go.Figure, names: Sequence[str]) -> None:
    """Let one of the traces be chosen; the first one is shown."""
    if len(names) < 2:
        return
    figure.update_layout(
        updatemenus=[
            {
                "x": 0,
                "xanchor": "left",
                "y": 1.02,
                "yanchor": "bottom",
                "buttons": [
                    {
                        "label": name,
                        "method": "update",
                        "args": [{"visible": [i == chosen for i in range(len(names))]}],
                    }
                    for chosen, name in enumerate(names)
                ],
            }
        ]
    )
