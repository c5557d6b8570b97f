"""Draw a run from its `metrics.jsonl`: loss, global norm, local norms by layer and step."""

import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

__all__ = ["draw_run"]

_RAW = "#2f6db3"
_AVERAGED = "#d1662c"
_FAINT = "#a9bfd8"
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


def draw_run(metrics: Path, picture: Path, *, max_grad_norm: float, title: str) -> None:
    """Draw three panels over a common axis of steps.

    Args:
        metrics: JSON lines with ``step``; those of training steps have the names of
            `LocalNormStepOutput`, those of evaluations ``eval_loss`` and maybe ``ema_eval_loss``.
        picture: PNG file that is written.
        max_grad_norm: Limit of the global norm, drawn as a line.
        title: Heading.
    """
    records = [json.loads(line) for line in metrics.read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    evaluations = [record for record in records if "eval_loss" in record]
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, 8), dpi=150, layout="constrained")
        loss, norm, layers = figure.subplots(
            3, 1, sharex=True, gridspec_kw={"height_ratios": [3, 2, 2.4]}
        )
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        _draw_loss(loss, steps, evaluations)
        _draw_norm(norm, steps, max_grad_norm)
        mesh = _draw_layers(layers, steps)
        figure.colorbar(mesh, ax=layers, pad=0.01, label="L2 norm", format="{x:g}")
        layers.set_xlabel("step")
        layers.set_xlim(0.5, steps[-1]["step"] + 0.5)
        figure.savefig(picture)


def _draw_loss(axes: Axes, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    numbers = [record["step"] for record in steps]
    losses = np.array([record["loss"] for record in steps])
    axes.set_title("Loss, in nats per byte")
    axes.plot(numbers, losses, color=_FAINT, linewidth=0.8, label="training, each step")
    axes.plot(numbers, _smoothed(losses), color=_RAW, linewidth=1.8, label="training, smoothed")
    # The larger one first, because the two losses often fall on one point.
    for key, color, size, label in (
        ("eval_loss", _RAW, 8, "held out, raw weights"),
        ("ema_eval_loss", _AVERAGED, 4, "held out, averaged weights"),
    ):
        points = [(record["step"], record[key]) for record in evaluations if key in record]
        if points:
            axes.plot(
                *zip(*points, strict=True),
                "o",
                color=color,
                markersize=size,
                label=label,
                clip_on=False,
                zorder=3,
            )
    _mark_skips(axes, steps)
    axes.legend(loc="upper right")
    axes.set_ylim(bottom=0)
    final = evaluations[-1]
    results = [f"{final[key]:.3f} {name}" for key, name in _RESULTS if key in final]
    axes.annotate(
        "held out at the end: " + ", ".join(results),
        (0.01, 0.05),
        xycoords="axes fraction",
        color="#444444",
    )


_RESULTS = (("eval_loss", "raw"), ("ema_eval_loss", "averaged"))


def _draw_norm(axes: Axes, steps: list[dict[str, Any]], max_grad_norm: float) -> None:
    axes.set_title("Global norm of the gradients, before clipping")
    numbers = [record["step"] for record in steps]
    axes.plot(numbers, [record["global_norm"] for record in steps], color=_RAW, linewidth=1)
    axes.axhline(max_grad_norm, color=_AVERAGED, linewidth=1, linestyle="--")
    axes.annotate(
        "clipped above", (1, max_grad_norm), xycoords=("axes fraction", "data"), color=_AVERAGED,
        ha="right", va="bottom", textcoords="offset points", xytext=(-4, 2),
    )  # fmt: skip
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())
    _mark_skips(axes, steps)


def _draw_layers(axes: Axes, steps: list[dict[str, Any]]) -> Any:
    names = list(steps[0]["local_norm"])
    norms = np.array([[record["local_norm"][name] for record in steps] for name in names])
    axes.set_title("Local norm by layer")
    positive = norms[np.isfinite(norms) & (norms > 0)]
    edges = np.arange(len(steps) + 1) + steps[0]["step"] - 0.5
    mesh = axes.pcolormesh(
        edges,
        np.arange(len(names) + 1) - 0.5,
        np.ma.masked_invalid(norms),
        cmap=mpl.colormaps["viridis"].with_extremes(bad="#c81e1e"),
        norm=LogNorm(*np.percentile(positive, (1, 99))),
    )
    axes.set_yticks(range(len(names)), [name.removeprefix("model.") for name in names])
    axes.invert_yaxis()
    axes.grid(visible=False)
    return mesh


def _mark_skips(axes: Axes, steps: list[dict[str, Any]]) -> None:
    for record in steps:
        if record["overflow"]:
            axes.axvline(record["step"], color="#c81e1e", linewidth=0.8, alpha=0.6)


def _smoothed(values: np.ndarray, weight: float = 0.9) -> list[float]:
    """Return the running mean that leaves out what is not finite."""
    smoothed, total, share = [], 0.0, 0.0
    for value in values:
        if np.isfinite(value):
            total, share = weight * total + (1 - weight) * value, weight * share + 1 - weight
        smoothed.append(total / share if share else float("nan"))
    return smoothed
