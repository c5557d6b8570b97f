"""Build the panels of a run page from the curves of its runs."""

import html
import math
from collections.abc import Callable, Collection, Sequence
from itertools import pairwise
from typing import Any

from mfwrap.memory import GIB
from mfwrap.records.evaluations import AVERAGED
from mfwrap.records.rewards import REWARD
from mfwrap.records.row_losses import BY_SOURCE
from mfwrap.records.run_record import TERM, Curve, RunRecord
from mfwrap.report.curves import COLORS, overflow_steps
from mfwrap.report.drawing import Panel, label, line, lines, rounded
from mfwrap.report.norm_maps import by_rank, families_of, maps_by_layer, norms_by_step

_LOSSES = ("loss", "eval_loss", f"{AVERAGED}eval_loss")

_OF_SOURCE = BY_SOURCE[0]
"""Prefix of the curves of the loss by source."""

_THROUGHPUT = ("throughput", "_per_second", "flops", "mfu", "_runtime", "_preparation_time")
"""Words in curve names: a curve with one of them belongs to the panel of throughput."""

_UNITS = {
    "throughput": "samples/s",
    "throughput_linearity": "share of the baseline",
    "samples_per_second": "samples/s",
    "steps_per_second": "steps/s",
    "tokens_per_second": "tokens/s",
    "mfu": "share of the peak",
    "time": "s",
}
"""Units of curves, by the end of their names."""

_MAX_SPANS = 200
"""Largest number of episodes of a run that are marked in the curves; a browser draws more slowly
with each."""

_OWN_PANEL = {
    *_LOSSES, "applied_updates", "global_norm", "learning_rate", "loss_scale", "max_grad_norm",
    "noise_scale", "overflow", "overflows", "seconds", "skipped_updates", "tokens",
}  # fmt: skip

_MEMORY = {
    "max_memory_allocated": ("allocated, peak", "GiB"),
    "max_memory_reserved": ("reserved, peak", "GiB"),
    "max_memory_share": ("reserved, peak as a share of the device", ""),
    "memory_allocated": ("allocated after the step", "GiB"),
    "num_alloc_retries": ("allocation retries", ""),
    "host_memory": ("process on the host", "GiB"),
    "max_host_memory": ("process on the host, peak", "GiB"),
}
"""By name of a curve: what the panel of memory calls it, and its unit."""

_FEW_DECADES = 20
"""Factor between the largest and the median loss, or between the rates of runs, above which they
need a logarithmic axis."""


def panels_of(runs: Sequence[RunRecord]) -> list[Panel]:
    """Return the panels of a run page; a panel without recorded numbers is left out.

    Args:
        runs: At least one run. Each run has the same color in all panels.
    """
    of_layers = {name for run in runs for family in families_of(run).values() for name in family}
    rewards = _rewards(runs)
    panels = [
        rewards,
        _loss(runs),
        _choice(runs, "terms", "Losses that were reported by name", _is_term),
        _sources(runs),
        _evaluations(runs),
        _one_curve(
            runs,
            "learning_rate",
            title="Learning rate",
            note="Learning rate of the first parameter group.",
            log=_rates_differ(runs),
        ),
        _loss_scale(runs),
        _global_norm(runs),
        _one_curve(
            runs,
            "noise_scale",
            title="Gradient noise scale",
            note="A batch that is larger than this makes the gradient little better.",
            unit="samples",
            log=True,
        ),
        norms_by_step(runs),
        *maps_by_layer(runs),
        *by_rank(runs),
        _choice(runs, "throughput", "Throughput", _is_throughput),
        _memory(runs),
        _choice(
            runs,
            "others",
            "Everything else that was recorded",
            lambda name: (
                not (
                    name in _OWN_PANEL
                    or name.startswith(_OF_SOURCE)
                    or name in of_layers
                    or _is_throughput(name)
                    or _is_term(name)
                    or _is_evaluation(name)
                    or name in _MEMORY
                    or name in rewards.content["choices"]
                )
            ),
        ),
    ]
    return [panel for panel in panels if not panel.is_empty]


def spans_of(runs: Sequence[RunRecord]) -> list[list[int]]:
    """Return index of the run, first and last step of each episode and each rollback."""
    return [
        [number, first, last]
        for number, run in enumerate(runs)
        for first, last in [
            *((episode.step, episode.last_step) for episode in run.episodes),
            *((rollback.first_step, rollback.last_step) for rollback in run.rollbacks),
        ][:_MAX_SPANS]
    ]


def _curves(traces: list[dict[str, Any]], **settings: Any) -> dict[str, Any]:
    return {"kind": "curves", "traces": traces, **settings}


def _rewards(runs: Sequence[RunRecord]) -> Panel:
    """Return a panel of the rewards of a training that generates; empty for any other training.

    It comes first: the loss of such a training is about zero and says little about its progress.
    """
    generates = any(REWARD in run.curves for run in runs)
    names = {name for run in runs for name in run.curves} if generates else set()
    found = sorted(name for name in names if name.startswith(f"{REWARD}s/"))
    of_all = [name for name in (REWARD, f"{REWARD}_std") if name in names]
    return _menu(runs, "rewards", "Reward", [*of_all, *found])


def _loss(runs: Sequence[RunRecord]) -> Panel:
    training, raw, averaged = _LOSSES
    words = "evaluation, averaged weights"
    traces = [
        *lines(runs, training, "training", smooth=True),
        *lines(runs, raw, "evaluation", symbol="circle", weights="raw"),
        *lines(runs, averaged, words, symbol="diamond-open", weights="averaged"),
    ]
    note = (
        "Unscaled loss on this rank's data. Crosses at the top mark steps whose loss is NaN or "
        "infinite."
    )
    return Panel("loss", "Loss", note, _curves(traces, log=_spreads(runs), may_log=True))


def _sources(runs: Sequence[RunRecord]) -> Panel:
    """Return a panel of the loss by source: all sources of one run, or a menu for several."""
    title = "Loss by source"
    found = [name for name in runs[0].curves if name.startswith(_OF_SOURCE)]
    if len(runs) > 1 or len(found) > len(COLORS):
        return _choice(runs, "sources", title, lambda name: name.startswith(_OF_SOURCE))
    traces = [
        line(0, name.removeprefix(_OF_SOURCE), runs[0].curves[name], smooth=True, color=place)
        for place, name in enumerate(found)
    ]
    note = "Mean loss of the targets of each source of the data, over all ranks."
    return Panel("sources", title, note, _curves(traces, may_log=True))


def _spreads(runs: Sequence[RunRecord]) -> bool:
    """Return whether one axis of losses without a logarithm would show only the largest ones."""
    curves = [run.curves.get("loss", Curve()).values for run in runs]
    finite = sorted(value for values in curves for value in values if math.isfinite(value))
    return bool(finite) and finite[0] > 0 and finite[-1] > _FEW_DECADES * finite[len(finite) // 2]


def _rates_differ(runs: Sequence[RunRecord]) -> bool:
    """Return whether one axis without a logarithm would show some run's learning rate as zero."""
    curves = [run.curves.get("learning_rate", Curve()).values for run in runs]
    highest = [max(values, default=0.0) for values in curves]
    known = [rate for rate in highest if 0 < rate < math.inf]
    return bool(known) and max(known) > _FEW_DECADES * min(known)


def _evaluations(runs: Sequence[RunRecord]) -> Panel:
    """Return a panel of the metrics of evaluations other than the loss and the timings."""
    found = dict.fromkeys(
        name.removeprefix(AVERAGED)
        for run in runs
        for name in run.curves
        if _is_evaluation(name) and name not in _LOSSES
    )
    names = sorted(found, key=lambda name: name != f"eval_{REWARD}")  # it is what is learned
    traces: list[dict[str, Any]] = []
    for choice, name in enumerate(names):
        of_both = {"choice": choice, "marks": True}
        traces += lines(runs, name, name, weights="raw", **of_both)
        words = f"{name}, averaged weights"
        traces += lines(runs, AVERAGED + name, words, weights="averaged", **of_both)
    note = "Results of the evaluations."
    return Panel("evaluations", "Evaluation", note, _curves(traces, choices=names))


def _is_evaluation(name: str) -> bool:
    return name.removeprefix(AVERAGED).startswith("eval_") and not _is_throughput(name)


def _is_term(name: str) -> bool:
    return name.startswith(TERM)


def _is_throughput(name: str) -> bool:
    return any(word in name for word in _THROUGHPUT)


def _one_curve(
    runs: Sequence[RunRecord],
    key: str,
    *,
    title: str,
    note: str,
    log: bool,
    unit: str = "",
) -> Panel:
    traces = lines(runs, key, title)
    return Panel(key, title, note, _curves(traces, log=log, may_log=True, unit=unit))


def _loss_scale(runs: Sequence[RunRecord]) -> Panel:
    note = "Loss scale that the next step uses. Crosses mark steps whose gradients overflowed."
    traces = lines(runs, "loss_scale", "loss scale", shape="hv")
    num_scales = len(traces)
    for number, run in enumerate(runs):
        scale = run.curves.get("loss_scale", Curve())
        at = dict(zip(scale.steps, scale.values, strict=True))
        steps = [step for step in overflow_steps(run) if step in at]
        if steps:
            overflows = Curve(steps, [at[step] for step in steps])
            traces.append(line(number, label(run, "overflow", runs), overflows, symbol="x-thin"))
    scales = {value for run in runs for value in run.curves.get("loss_scale", Curve()).values}
    if scales == {1.0} and len(traces) == num_scales:
        traces = []  # gradients are not scaled, as usual in float32
    content = _curves(traces, log=True, ticks=_powers_of_two(runs))
    return Panel("loss_scale", "Loss scale", note, content)


def _powers_of_two(runs: Sequence[RunRecord]) -> list[int]:
    """Return the exponents of the ticks of the axis of loss scales: about eight."""
    curves = [run.curves.get("loss_scale", Curve()) for run in runs]
    scales = [scale for curve in curves for scale in curve.values if 0 < scale < math.inf]
    low, high = min(scales, default=1.0), max(scales, default=1.0)
    lowest, highest = math.floor(math.log2(low)), math.ceil(math.log2(high))
    return list(range(lowest, highest + 1, max(1, math.ceil((highest - lowest) / 8))))


def _global_norm(runs: Sequence[RunRecord]) -> Panel:
    limits = [
        {"run": number, "y": rounded(limit), "text": f"clipped above {limit:g}"}
        for number, run in enumerate(runs)
        if "global_norm" in run.curves
        and (limit := run.max_grad_norm) is not None
        and math.isfinite(limit)
    ]
    note = (
        "L2 norm of all unscaled gradients before clipping. Crosses at the top mark steps whose "
        "norm is NaN or infinite."
    )
    traces = lines(runs, "global_norm", "global norm", smooth=True)
    content = _curves(traces, log=True, may_log=True, limits=limits)
    return Panel("global_norm", "Global norm", note, content)


def _memory(runs: Sequence[RunRecord]) -> Panel:
    """Return a panel of what `mfwrap.callbacks.MemoryMonitor` has recorded, bytes as GiB."""
    found = {key: kind for key, kind in _MEMORY.items() if any(key in run.curves for run in runs)}
    traces = [
        line(number, label(run, what, runs), shown, choice=choice, shape="hv")
        for choice, (key, (what, unit)) in enumerate(found.items())
        for number, run in enumerate(runs)
        if (curve := run.curves.get(key))
        for shown in [Curve(curve.steps, [v / GIB if unit else v for v in curve.values])]
    ]
    choices, units = [what for what, _ in found.values()], [unit for _, unit in found.values()]
    note = "Memory of rank 0. Peaks are those since its process began."
    return Panel("memory", "Memory", note, _curves(traces, choices=choices, units=units))


def _choice(
    runs: Sequence[RunRecord], name: str, title: str, belongs: Callable[[str], bool]
) -> Panel:
    """Return a panel with a menu that chooses one of the curves whose names `belongs` accepts."""
    found = sorted(
        {key for run in runs for key in run.curves if belongs(key)},
        key=lambda key: (
            _is_constant(runs, key),
            key.startswith("eval_"),
            key.endswith("time"),
            key,
        ),
    )
    return _menu(runs, name, title, found)


def _menu(runs: Sequence[RunRecord], name: str, title: str, found: Sequence[str]) -> Panel:
    """Return a panel with a menu that chooses one of the curves; an empty one without curves."""
    traces = [
        line(number, label(run, kind, runs), curve, choice=choice, **_form(curve))
        for choice, kind in enumerate(found)
        for number, run in enumerate(runs)
        if (curve := run.curves.get(kind))
    ]
    units = [_unit(each) for each in found]
    content = _curves(traces, choices=list(found), may_log=True, units=units)
    note = "" if len(found) > 1 else html.escape("".join(found))
    return Panel(name, title, note, content)


def _is_constant(runs: Sequence[RunRecord], name: str) -> bool:
    curves = [run.curves.get(name, Curve()).values for run in runs]
    return all(len(set(values)) < 2 for values in curves) and any(len(v) > 1 for v in curves)


def _form(curve: Curve) -> dict[str, Any]:
    """Return how to draw a curve: counts as stairs, because smoothing would invent fractions."""
    values = curve.values
    is_count = all(math.isfinite(value) and value == int(value) for value in values)
    is_count = is_count and all(a <= b for a, b in pairwise(values))
    return {"shape": "hv"} if is_count else {"smooth": True}


def _unit(name: str) -> str:
    return next((unit for end, unit in _UNITS.items() if name.endswith(end)), "")


def has_averages(panels: Collection[Panel]) -> bool:
    """Return whether results of averaged weights are among the curves."""
    traces = (trace for panel in panels for trace in panel.content.get("traces", ()))
    return any(trace.get("weights") == "averaged" for trace in traces)


def axes_of(run: RunRecord) -> dict[str, dict[str, list[Any]]]:
    """Return what a page may show in the place of the step: tokens, and seconds of training.

    Returns:
        Steps and values of each, in ascending order; a quantity that was not recorded is left out.
    """
    found = {}
    for name in ("tokens", "seconds"):
        curve = run.curves.get(name, Curve())
        if len(curve.steps) > 1 and all(a <= b for a, b in pairwise(curve.values)):
            short = line(0, name, curve)
            found[name] = {"x": short["x"], "y": short["y"]}
    return found
