"""Helpers for the plotly figures of a run page's panels."""

import html
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import plotly.graph_objects as go

from mfwrap.records.run_record import Curve, RunRecord
from mfwrap.report.curves import COLORS, NUMBER, thinned, with_gaps

_HOVER = f"step %{{x}}: %{{y:{NUMBER}}}<extra>%{{fullData.name}}</extra>"


class Panel(NamedTuple):
    """A figure with its heading and explanation."""

    name: str
    """Identifier in the page."""

    title: str
    note: str
    """What the figure shows, as HTML."""

    figure: go.Figure
    has_steps: bool = True
    """Whether the horizontal axis shows steps."""


def color_of(number: int) -> str:
    """Return the color of the run with index `number`."""
    return COLORS[number % len(COLORS)]


def label(run: RunRecord, what: str, runs: Sequence[RunRecord]) -> str:
    """Return the name of a trace as HTML; it includes the run's name if there are several runs."""
    return html.escape(f"{run.name}: {what}" if len(runs) > 1 else what)


def line(curve: Curve, name: str, color: str, **settings: Any) -> go.Scatter:
    """Return a curve as a line with gaps at non-finite values; long curves are thinned."""
    shown = thinned(curve)
    return go.Scatter(
        x=shown.steps,
        y=with_gaps(shown.values),
        name=name,
        mode="lines" if len(shown.steps) > 1 else "markers",
        line={"color": color, "width": 2},
        hovertemplate=_HOVER,
        **settings,
    )


def points(steps: Sequence[int], values: Sequence[Any], name: str, **marker: Any) -> go.Scatter:
    """Return markers at some steps.

    Args:
        steps: Horizontal positions.
        values: Vertical positions.
        name: Name in the legend.
        marker: Plotly's settings of a marker, such as ``symbol``.
    """
    return go.Scatter(
        x=list(steps),
        y=list(values),
        name=name,
        mode="markers",
        marker={"size": 9} | marker,
        hovertemplate=_HOVER,
    )


def add_menu(figure: go.Figure, choices: Mapping[str, Sequence[bool]]) -> None:
    """Add a menu that chooses which traces are visible. A single choice gets no menu.

    Args:
        figure: Figure with its traces. Exactly the traces of the first choice must be visible.
        choices: Whether each trace is visible, for each menu entry, keyed by the entry's text.
    """
    if len(choices) < 2:
        return
    buttons = [
        {"label": text, "method": "update", "args": [{"visible": list(visible)}]}
        for text, visible in choices.items()
    ]
    place = {"x": 0, "xanchor": "left", "y": 1.03, "yanchor": "bottom"}
    figure.update_layout(updatemenus=[{**place, "buttons": buttons}])
