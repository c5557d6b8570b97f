"""Maps of local norms: layer by step, and layer by rank."""

import html
import math
from collections.abc import Sequence
from itertools import chain
from typing import Any

import plotly.graph_objects as go

from mfwrap.records.run_record import Curve, RunRecord
from mfwrap.report.curves import NUMBER, binned
from mfwrap.report.drawing import Panel, add_menu, label

_MAX_SLIDER_STEPS = 60


def norms_by_step(runs: Sequence[RunRecord]) -> list[Panel]:
    """Return a panel with maps of local norms by layer and step; a menu chooses run and rank.

    Returns:
        A list of one panel; an empty list if no run recorded local norms.
    """
    figure = go.Figure()
    names: list[str] = []
    for run in runs:
        for rank, groups in run.local_norms.items():
            steps, norms = binned(groups)
            figure.add_trace(_heatmap(norms, steps, list(groups), "step"))
            figure.data[-1].visible = not names
            names.append(label(run, f"rank {rank}", runs))
    if not names:
        return []
    add_menu(figure, {name: [other == name for other in names] for name in names})
    rows = max(len(groups) for run in runs for groups in run.local_norms.values())
    _set_rows(figure, rows, around=120)
    note = (
        "L2 norm of each group of this rank's own gradients, before they are reduced over ranks. "
        "A column that stands for several steps shows their largest norm. Gaps are non-finite or "
        "zero."
    )
    return [Panel("local-norms", "Local norms by layer and step", note, figure)]


def norms_by_rank(runs: Sequence[RunRecord]) -> list[Panel]:
    """Map local norms by layer and rank, with a step slider: one panel per multi-rank run."""
    panels = []
    for number, run in enumerate(runs):
        if len(run.local_norms) < 2:
            continue
        names = list(next(iter(run.local_norms.values())))
        steps = sorted({s for g in run.local_norms.values() for c in g.values() for s in c.steps})
        # Pick steps from the end backwards, so that the last step is among them.
        steps = steps[:: -math.ceil(len(steps) / _MAX_SLIDER_STEPS)][::-1]
        ranks = [f"rank {rank}" for rank in run.local_norms]
        figure = go.Figure()
        for step in steps:
            norms = [[_at(g.get(name), step) for g in run.local_norms.values()] for name in names]
            figure.add_trace(_heatmap(norms, ranks, names, "on"))
            figure.data[-1].visible = step == steps[-1]
        _add_slider(figure, steps)
        _set_rows(figure, len(names), around=180)
        title = label(run, "Local norms by layer and rank", runs)
        note = "Local norms of one step. The slider chooses the step."
        panels.append(Panel(f"ranks-{number}", title, note, figure, has_steps=False))
    return panels


def _heatmap(z: list[list[float | None]], x: Sequence[Any], y: Sequence[str], what: str) -> Any:
    """Return a heat map of norms with a logarithmic color scale."""
    logs = [[math.log10(v) if v else None for v in row] for row in z]
    known = [v for v in chain.from_iterable(logs) if v is not None]
    low, high = math.floor(min(known, default=0)), math.ceil(max(known, default=1))
    ticks = list(range(low, max(high, low + 1) + 1))
    return go.Heatmap(
        z=logs,
        x=list(x),
        y=[html.escape(name) for name in y],
        customdata=z,
        colorscale="Viridis",
        colorbar={
            "title": "L2 norm",
            "tickvals": ticks,
            "ticktext": [f"1e{tick}" for tick in ticks],
            "thickness": 12,
        },
        hovertemplate=f"%{{y}}<br>{what} %{{x}}<br>norm %{{customdata:{NUMBER}}}<extra></extra>",
        hoverongaps=False,
    )


def _set_rows(figure: go.Figure, rows: int, *, around: int) -> None:
    """Set the height of the figure by its number of rows, and put the first group at the top."""
    figure.update_yaxes(autorange="reversed", tickfont_size=10)
    figure.update_layout(height=max(280, min(1400, around + 18 * rows)))


def _at(curve: Curve | None, step: int) -> float | None:
    if curve is None or step not in curve.steps:
        return None
    value = curve.values[curve.steps.index(step)]
    return value if math.isfinite(value) else None


def _add_slider(figure: go.Figure, steps: Sequence[int]) -> None:
    positions = [
        {
            "label": str(step),
            "method": "update",
            "args": [{"visible": [other == step for other in steps]}],
        }
        for step in steps
    ]
    slider = {"active": len(steps) - 1, "currentvalue": {"prefix": "step "}, "steps": positions}
    figure.update_layout(sliders=[slider])
