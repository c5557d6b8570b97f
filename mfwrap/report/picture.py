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

from mfwrap.checkpoints.folders import whole_file

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


def draw_run(
    metrics: Path,
    picture: Path,
    *,
    max_grad_norm: float | None,
    title: str,
    loss_title: str = "Loss, in nats per byte",
) -> None:
    """Draw up to three panels over a common axis of steps: those that there are numbers for.

    Args:
        metrics: JSON lines with ``step``; those of training steps have the names of
            `LocalNormStepOutput`, those of evaluations ``eval_loss`` and maybe ``ema_eval_loss``.
        picture: PNG file that is written.
        max_grad_norm: Limit of the global norm, drawn as a line; ``None`` draws none.
        title: Heading.
        loss_title: Heading of the panel of losses.

    Raises:
        ValueError: If there is no training step.
    """
    records = [_numbers(json.loads(line)) for line in metrics.read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    if not steps:
        msg = f"`metrics` must hold a training step, got {metrics} with none"
        raise ValueError(msg)
    evaluations = [record for record in records if {"eval_loss", "ema_eval_loss"} & record.keys()]
    has_norm = steps[0].get("global_norm") is not None
    has_layers = bool(steps[0].get("local_norm"))
    heights = [3.0] + [2.0] * has_norm + [2.4] * has_layers
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(9, sum(heights) * 8 / 7.4), dpi=150, layout="constrained")
        panels = figure.subplots(
            len(heights), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights}
        )[:, 0]
        figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
        panels[0].set_title(loss_title)
        _draw_loss(panels[0], steps, evaluations)
        if has_norm:
            _draw_norm(panels[1], steps, max_grad_norm)
        if has_layers:
            mesh = _draw_layers(panels[-1], steps)
            figure.colorbar(mesh, ax=panels[-1], pad=0.01, label="L2 norm", format="{x:g}")
        panels[-1].set_xlabel("step")
        panels[-1].set_xlim(0.5, steps[-1]["step"] + 0.5)
        with whole_file(picture) as partial:
            figure.savefig(partial, format="png")


def _numbers(record: dict[str, Any]) -> dict[str, Any]:
    """Return a record with ``"nan"`` and ``"inf"``, which JSON has no numbers for, as numbers."""
    return {
        key: _numbers(value)
        if isinstance(value, dict)
        else float(value)
        if isinstance(value, str)
        else value
        for key, value in record.items()
    }


def _draw_loss(axes: Axes, steps: list[dict[str, Any]], evaluations: list[dict[str, Any]]) -> None:
    numbers = [record["step"] for record in steps]
    losses = np.array([record["loss"] for record in steps])
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
    if not evaluations:
        return
    final = evaluations[-1]
    results = [f"{final[key]:.3f} {name}" for key, name in _RESULTS if key in final]
    axes.annotate(
        "held out at the end: " + ", ".join(results),
        (0.01, 0.05),
        xycoords="axes fraction",
        color="#444444",
    )


_RESULTS = (("eval_loss", "raw"), ("ema_eval_loss", "averaged"))


def _draw_norm(axes: Axes, steps: list[dict[str, Any]], max_grad_norm: float | None) -> None:
    axes.set_title("Global norm of the gradients, before clipping")
    numbers = [record["step"] for record in steps]
    axes.plot(numbers, [record["global_norm"] for record in steps], color=_RAW, linewidth=1)
    if max_grad_norm is not None:
        axes.axhline(max_grad_norm, color=_AVERAGED, linewidth=1, linestyle="--")
        axes.annotate(
            "clipped above", (1, max_grad_norm), xycoords=("axes fraction", "data"),
            color=_AVERAGED, ha="right", va="bottom", textcoords="offset points", xytext=(-4, 2),
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
