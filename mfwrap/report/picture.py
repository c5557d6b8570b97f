"""A picture of a run: loss, global norm, and local norms by layer and step."""

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from mfwrap.checkpoints.whole import whole_file
from mfwrap.records.evaluations import AVERAGED
from mfwrap.records.run_record import Curve, RunRecord, not_a_run_folder, read_run
from mfwrap.report.curves import COLORS, NOT_FINITE_COLOR, NUMBER, binned, overflow_steps, smoothed
from mfwrap.report.own_files import WRITER

_RAW, _AVERAGED = COLORS[:2]
_EVALUATIONS = (
    ("eval_loss", "raw", _RAW, 8),
    (f"{AVERAGED}eval_loss", "averaged", _AVERAGED, 4),
)
"""Curve, weights, color and marker size. The larger marker is drawn first, so that both are visible
where they coincide."""

_FEW = 1_000
"""Ratio of the ends of a logarithmic axis below which 1, 2 and 5 are labeled in each decade."""

_STYLE: Any = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "legend.frameon": False,
}

_OUTER = re.compile(r"^(base_model\.model\.)?(model\.)?|(\.default)?\.weight$")
"""What most layers' names begin or end with, in PEFT and transformers."""

_MOST_LABELS = 13
"""Largest number of layers whose names fit beside the map of norms."""


def draw_run(
    folder: Path, picture: Path, *, title: str | None = None, loss_title: str = "Loss"
) -> None:
    """Draw a run as a PNG: the loss, and below it the global norm and local norms, if recorded.

    Args:
        folder: Run folder, as `read_run` takes it.
        picture: PNG file to write or replace.
        title: Heading; by default the folder's name.
        loss_title: Heading of the loss panel.

    Raises:
        FileNotFoundError: If `folder` is not a run folder.
        ValueError: If a file in `folder` cannot be read, or no step has a loss.
    """
    run = read_run(folder)
    if not run.curves:  # it failed in its first step
        raise not_a_run_folder(folder)
    loss = run.curves.get("loss")
    if loss is None:
        msg = f"{folder} has no step with a loss, so there is nothing to plot"
        raise ValueError(msg)
    norm, local_norms = run.curves.get("global_norm"), run.local_norms.get(0)
    heights = [3.0] + [2.0] * (norm is not None) + [2.4] * (local_norms is not None)
    overflows = overflow_steps(run)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, sum(heights) * 8 / 7.4), dpi=150, layout="constrained")
        panels = figure.subplots(
            len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
        )[:, 0]
        heading = run.name if title is None else title
        figure.suptitle(heading, x=0.01, ha="left", fontsize=12, fontweight="bold")
        panels[0].set_title(loss_title)
        _draw_loss(panels[0], loss, run)
        _mark_overflows(panels[0], overflows)
        if norm is not None:
            _draw_norm(panels[1], norm, run.max_grad_norm)
            _mark_overflows(panels[1], overflows)
        if local_norms is not None:
            mesh = _draw_local_norms(panels[-1], local_norms)
            figure.colorbar(mesh, ax=panels[-1], pad=0.01, label="L2 norm", format="{x:g}")
        panels[-1].set_xlabel("step")
        panels[-1].set_xlim(0.5, run.last_step() + 0.5)
        with whole_file(picture, must_be_listed=False) as partial:
            figure.savefig(partial, format="png", metadata={"Software": WRITER})


def _draw_loss(axes: Axes, loss: Curve, run: RunRecord) -> None:
    axes.plot(loss.steps, loss.values, color=_RAW, alpha=0.4, linewidth=0.8, label="training")
    mean = smoothed(loss)
    axes.plot(mean.steps, mean.values, color=_RAW, linewidth=1.8, label="training, smoothed")
    results = []
    for name, weights, color, size in _EVALUATIONS:
        if curve := run.curves.get(name):
            axes.plot(
                curve.steps,
                curve.values,
                "o",
                color=color,
                markersize=size,
                label=f"held out, {weights} weights",
                clip_on=False,
                zorder=3,
            )
            results.append(f"{curve.values[-1]:{NUMBER}} with {weights} weights")
    axes.legend(loc="upper right")
    axes.set_ylim(bottom=0)
    if results:
        said = "last loss on held-out data: " + ", ".join(results)
        axes.set_title(said, loc="right", fontsize=9, fontweight="normal", color="#444444")


def _draw_norm(axes: Axes, norm: Curve, max_grad_norm: float | None) -> None:
    axes.set_title("Global norm of the gradients, before clipping")
    axes.plot(norm.steps, norm.values, color=_RAW, linewidth=1)
    if max_grad_norm is not None and math.isfinite(max_grad_norm):
        axes.axhline(max_grad_norm, color=_AVERAGED, linewidth=1, linestyle="--")
        axes.annotate(
            "clipped above", (1, max_grad_norm), xycoords=("axes fraction", "data"),
            color=_AVERAGED, ha="right", va="bottom", textcoords="offset points", xytext=(-4, 2),
        )  # fmt: skip
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    # For many decades, a locator of 1, 2 and 5 finds no tick.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < _FEW * low else (1,)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_local_norms(axes: Axes, groups: Mapping[str, Curve]) -> Any:
    axes.set_title("Local norm by layer")
    steps, rows = binned(groups)
    norms = np.array(rows, dtype=float)  # None becomes NaN
    positive = norms[norms > 0]
    if positive.size:
        norms = np.where(norms == 0, positive.min(), norms)  # a logarithm has no place for zero
    last = max(curve.steps[-1] for curve in groups.values() if curve.steps)
    mesh = axes.pcolormesh(
        np.array([*steps, last + 1]) - 0.5,
        np.arange(len(groups) + 1) - 0.5,
        np.ma.masked_invalid(norms),
        cmap=mpl.colormaps["viridis"].with_extremes(bad=NOT_FINITE_COLOR),
        norm=LogNorm(*np.percentile(positive, (1, 99))) if positive.size else None,
    )
    names = [_OUTER.sub("", name) for name in groups]
    places = range(0, len(names), math.ceil(len(names) / _MOST_LABELS))
    axes.set_yticks(places, [names[place] for place in places])
    axes.invert_yaxis()
    axes.grid(visible=False)
    return mesh


def _mark_overflows(axes: Axes, steps: Sequence[int]) -> None:
    for step in steps:
        axes.axvline(step, color=NOT_FINITE_COLOR, linewidth=0.8, alpha=0.6)
