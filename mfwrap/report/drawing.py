"""Maps of local norms: layer by step, and layer by rank."""

import html
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import plotly.graph_objects as go

from mfwrap.records.run_record import Curve, RunRecord
from mfwrap.report.run_drawing import Panel, label

__all__ = ["norms_by_rank", "norms_by_step"]

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
