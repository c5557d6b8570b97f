"""Build the panels of a run page from the curves of its runs."""

import html
import math
from collections.abc import Callable, Sequence
from typing import Any

import plotly.graph_objects as go

from mfwrap.records.run_record import Curve, RunRecord
from mfwrap.report.curves import NOT_FINITE_COLOR, overflow_steps, smoothed, with_gaps
from mfwrap.report.drawing import Panel, add_menu, color_of, label, line, points
from mfwrap.report.norm_maps import norms_by_rank, norms_by_step

_THROUGHPUT = ("throughput", "_per_second", "flops", "mfu")
"""Words in curve names: a curve with one of them belongs to the panel of throughput."""

_MAX_SPANS = 200
"""Largest number of episodes of a run that are marked in the curves; a browser draws more slowly
with each."""

_LOGIT = "max_attention_logit/"
_MOST_MODULES = 6
"""Largest number of modules in the panel of attention logits; with several runs it is one each."""

_OWN_PANEL = {
    *("loss", "eval_loss", "ema_eval_loss", "learning_rate", "loss_scale", "global_norm"),
    *(
        "noise_scale",
        "overflow",
        "overflows",
        "applied_updates",
        "skipped_updates",
        "max_grad_norm",
    ),
}


def panels_of(runs: Sequence[RunRecord]) -> list[Panel]:
    """Return the panels of a run page; a panel without recorded numbers is left out.

    Args:
        runs: At least one run. Each run has the same color in all panels.
    """
    panels = [
        _loss(runs),
        _lines(
            runs, "learning_rate", "Learning rate", "Learning rate of the first parameter group."
        ),
        _loss_scale(runs),
        _global_norm(runs),
        _noise_scale(runs),
        *norms_by_step(runs),
        *norms_by_rank(runs),
        _attention_logits(runs),
        _choice(
            runs,
            "throughput",
            "Throughput",
            lambda name: any(word in name for word in _THROUGHPUT),
        ),
        _choice(
            runs,
            "others",
            "Everything else that was recorded",
            lambda name: name not in _OWN_PANEL and not any(w in name for w in _THROUGHPUT),
        ),
    ]
    shown = [panel for panel in panels if panel.figure.data]
    steps = [s for run in runs for curve in run.curves.values() for s in curve.steps]
    if steps:
        margin = 0.01 * (max(steps) - min(steps)) + 0.5
        for panel in shown:
            if panel.has_steps:
                _mark_episodes(panel.figure, runs)
                panel.figure.update_xaxes(range=[min(steps) - margin, max(steps) + margin])
    return shown


def _loss(runs: Sequence[RunRecord]) -> Panel:
    figure = go.Figure()
    for number, run in enumerate(runs):
        color = color_of(number)
        if curve := run.curves.get("loss"):
            raw = line(curve, label(run, "training, each step", runs), color, opacity=0.5)
            raw.update(line_width=1)
            figure.add_trace(raw)
            figure.add_trace(line(smoothed(curve), label(run, "training, smoothed", runs), color))
            _mark_non_finite(figure, curve, label(run, "loss not finite", runs))
        for key, words, symbol in (
            ("eval_loss", "evaluation", "circle"),
            ("ema_eval_loss", "evaluation, averaged weights", "diamond-open"),
        ):
            if curve := run.curves.get(key):
                name = label(run, words, runs)
                marks = points(curve.steps, with_gaps(curve.values), name, color=color)
                figure.add_trace(marks.update(marker_symbol=symbol, marker_line_width=2))
    note = "Unscaled loss on this rank's data. Crosses mark steps whose loss is NaN or infinite."
    return Panel("loss", "Loss", note, figure)


def _mark_non_finite(figure: go.Figure, curve: Curve, name: str) -> None:
    steps = [s for s, v in zip(curve.steps, curve.values, strict=True) if not math.isfinite(v)]
    if steps:
        top = max((v for v in curve.values if math.isfinite(v)), default=0.0)
        marker = {"symbol": "x", "color": NOT_FINITE_COLOR}
        figure.add_trace(points(steps, [top] * len(steps), name, **marker))


def _lines(runs: Sequence[RunRecord], key: str, title: str, note: str) -> Panel:
    figure = go.Figure()
    for number, run in enumerate(runs):
        if curve := run.curves.get(key):
            figure.add_trace(line(curve, label(run, title, runs), color_of(number)))
    return Panel(key, title, note, figure)


def _loss_scale(runs: Sequence[RunRecord]) -> Panel:
    note = (
        "Loss scale that the next step uses, on a logarithmic axis. Crosses mark steps whose "
        "gradients overflowed."
    )
    panel = _lines(runs, "loss_scale", "Loss scale", note)
    panel.figure.update_traces(line_shape="hv")
    panel.figure.update_yaxes(type="log", **_powers_of_two(runs))
    for number, run in enumerate(runs):
        scale = run.curves.get("loss_scale")
        steps = overflow_steps(run)
        if scale is not None and steps:
            at = dict(zip(scale.steps, scale.values, strict=True))
            values = [at.get(step) for step in steps]
            name = label(run, "overflow", runs)
            panel.figure.add_trace(
                points(steps, values, name, symbol="x", color=color_of(number), line_width=1)
            )
    return panel


def _powers_of_two(runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return the ticks of the axis of loss scales: about a dozen powers of two."""
    scales = [
        scale
        for run in runs
        for scale in run.curves.get("loss_scale", Curve()).values
        if 0 < scale < math.inf
    ]
    low, high = min(scales, default=1.0), max(scales, default=1.0)
    lowest, highest = math.floor(math.log2(low)), math.ceil(math.log2(high))
    ticks = range(lowest, highest + 1, max(1, math.ceil((highest - lowest) / 12)))
    return {"tickvals": [2.0**tick for tick in ticks], "ticktext": [f"2^{tick}" for tick in ticks]}


def _global_norm(runs: Sequence[RunRecord]) -> Panel:
    note = "L2 norm of all unscaled gradients before clipping, on a logarithmic axis."
    panel = _lines(runs, "global_norm", "Global norm", note)
    panel.figure.update_yaxes(type="log", dtick="D2", exponentformat="power")
    for number, run in enumerate(runs):
        curve = run.curves.get("global_norm")
        if curve is None:
            continue
        _mark_non_finite(panel.figure, curve, label(run, "norm not finite", runs))
        if run.max_grad_norm is not None and math.isfinite(run.max_grad_norm):
            panel.figure.add_hline(
                run.max_grad_norm,
                line={"dash": "dash", "width": 1.5, "color": color_of(number)},
            )
            panel.figure.add_annotation(
                text=f"clipped above {run.max_grad_norm:g}",
                x=0.005,
                xref="paper",
                # On a logarithmic axis, plotly positions labels by the logarithm.
                y=math.log10(run.max_grad_norm),
                xanchor="left",
                yanchor="bottom",
                showarrow=False,
            )
    return panel


def _noise_scale(runs: Sequence[RunRecord]) -> Panel:
    note = (
        "Gradient noise scale in samples, on a logarithmic axis. A batch that is larger than this "
        "makes the gradient little better."
    )
    panel = _lines(runs, "noise_scale", "Gradient noise scale", note)
    panel.figure.update_yaxes(type="log", dtick="D2", exponentformat="power")
    return panel


def _attention_logits(runs: Sequence[RunRecord]) -> Panel:
    figure = go.Figure()
    several = len(runs) > 1
    for number, run in enumerate(runs):
        ends = {
            name: max((v for v in curve.values if math.isfinite(v)), default=-math.inf)
            for name, curve in run.curves.items()
            if name.startswith(_LOGIT) and name.endswith("/max")
        }
        largest = sorted(ends, key=lambda name: -ends[name])[: 1 if several else _MOST_MODULES]
        for place, name in enumerate(largest):
            module = name.removeprefix(_LOGIT).removesuffix("/max")
            words = html.escape(label(run, module, runs))
            color = color_of(number if several else place)
            figure.add_trace(line(run.curves[name], words, color))
    note = (
        "Largest attention logit of a module, on a logarithmic axis: the modules with the largest "
        "ones. Attention looks at single tokens when logits reach about 50 or more."
    )
    figure.update_yaxes(type="log", dtick=1, exponentformat="power")
    return Panel("attention_logits", "Attention logits", note, figure)


def _mark_episodes(figure: go.Figure, runs: Sequence[RunRecord]) -> None:
    """Shade the steps of episodes, and of rollbacks, in the colors of their runs."""
    shapes = list(figure.layout.shapes)
    for number, run in enumerate(runs):
        color = NOT_FINITE_COLOR if len(runs) == 1 else color_of(number)
        spans = [(episode.step, episode.last_step) for episode in run.episodes]
        spans += [(rollback.first_step, rollback.last_step) for rollback in run.rollbacks]
        shapes += [
            {
                "type": "rect",
                "name": "episode",
                "x0": first - 0.5,
                "x1": last + 0.5,
                "yref": "paper",
                "y0": 0,
                "y1": 1,
                "fillcolor": color,
                "opacity": 0.25,
                "line": {"color": color, "width": 1},
                "layer": "below",
            }
            for first, last in spans[:_MAX_SPANS]
        ]
    figure.update_layout(shapes=shapes)


def _choice(
    runs: Sequence[RunRecord], name: str, title: str, belongs: Callable[[str], bool]
) -> Panel:
    """Return a panel with a menu that chooses one of the curves whose names `belongs` accepts."""
    found = {key for run in runs for key in run.curves if belongs(key)}
    kinds = sorted(found, key=lambda key: (key.startswith("eval_"), key))
    figure = go.Figure()
    of_kind: list[str] = []
    for kind in kinds:
        for number, run in enumerate(runs):
            if curve := run.curves.get(kind):
                figure.add_trace(line(curve, label(run, kind, runs), color_of(number)))
                figure.data[-1].visible = kind == kinds[0]
                of_kind.append(kind)
    choices = {html.escape(kind): [each == kind for each in of_kind] for kind in kinds}
    add_menu(figure, choices)
    only = kinds[0] if kinds else ""
    note = "The menu chooses the curve." if len(kinds) > 1 else html.escape(only)
    return Panel(name, title, note, figure)
