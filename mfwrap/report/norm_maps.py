"""Maps of what was recorded for each layer: layer by step, and layer by rank."""

import math
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from mfwrap.records.row_losses import BY_SOURCE
from mfwrap.records.run_record import Curve, RunRecord
from mfwrap.report.curves import binned
from mfwrap.report.drawing import Panel, label, line

_MAX_COLUMNS = 300
"""Columns of a map that is not of local norms."""

_MAX_SLIDER_STEPS = 60
_MAX_RANK_CURVES = 8
_SCALE = 1000
"""The page holds logarithms to base 10 as integers, multiplied by this number."""

_LOGITS = re.compile(r"max_attention_logit/(?P<member>.+)/max")
_MEMBER = re.compile(r"(?P<family>[^/]+)/(?P<member>.+)")

_FEWEST_ROWS = 4
"""A family with fewer members is shown as single curves."""

_NO_MAPS = {"learning_rate", "rewards", *(prefix.rstrip("/") for prefix in BY_SOURCE)}

_FAMILIES = {
    "update_ratio": ("Update ratios", "Norm of the update of a weight, divided by its norm."),
    "max_attention_logit": (
        "Attention logits",
        "Largest of a module. Attention looks at single tokens when they reach about 50 or more.",
    ),
}
"""Families with a panel of their own: title and explanation."""


def families_of(run: RunRecord) -> dict[str, dict[str, str]]:
    """Return the curves of a run that belong together, such as the update ratios of all layers.

    Returns:
        For each family, what it was recorded of (a layer, or a parameter), by name of the curve.
        Of attention logits, these are the largest ones of each module; the curves of single heads
        belong to the family, too, but to no map.
    """
    families: dict[str, dict[str, str]] = {}
    for name in run.curves:
        if (match := _LOGITS.fullmatch(name)) or (match := _MEMBER.fullmatch(name)):
            family = match.groupdict().get("family", "max_attention_logit")
            families.setdefault(family, {})[name] = match["member"]
    return {
        name: members
        for name, members in families.items()
        if name in _FAMILIES or (name not in _NO_MAPS and _are_layers(members.values()))
    }


def _are_layers(members: Collection[str]) -> bool:
    """Return whether names are those of layers or parameters, of which some are inside others.

    TRL, for example, logs ``completions/mean_length`` and others like it, which are no layers.
    """
    return len(members) >= _FEWEST_ROWS and any("." in member for member in members)


def norms_by_step(runs: Sequence[RunRecord]) -> Panel:
    """Return a panel with maps of local norms by layer and step; a menu chooses run and rank."""
    maps = [
        {"family": "", **_map(number, label(run, f"rank {rank}", runs), groups)}
        for number, run in enumerate(runs)
        for rank, groups in run.local_norms.items()
    ]
    note = (
        "L2 norm of each group of this rank's own gradients, before they are reduced over ranks. "
        "A column that stands for several steps shows their largest norm. Red is NaN or infinite."
    )
    content = _maps(maps, runs)
    return Panel("local-norms", "Local norms by layer and step", note, content)


def maps_by_layer(runs: Sequence[RunRecord]) -> list[Panel]:
    """Return a panel for update ratios, one for attention logits, and one for all others."""
    panels, others = [], []
    of_runs = [families_of(run) for run in runs]
    for family in dict.fromkeys(name for families in of_runs for name in families):
        maps = [
            {
                "family": family,
                **_map(
                    number,
                    label(run, family if family not in _FAMILIES else "", runs).removesuffix(": "),
                    _members(run, family, families[family]),
                    _MAX_COLUMNS,
                ),
            }
            for number, (run, families) in enumerate(zip(runs, of_runs, strict=True))
            if family in families
        ]
        if family in _FAMILIES:
            title, note = _FAMILIES[family]
            content = _maps(maps, runs)
            panels.append(Panel(family, f"{title} by layer and step", note, content))
        else:
            others += maps
    note = "What was recorded of each layer or parameter."
    content = _maps(others, runs)
    return [*panels, Panel("layers", "By layer and step", note, content)]


def _maps(maps: list[dict[str, Any]], runs: Sequence[RunRecord]) -> dict[str, Any]:
    """Return maps with a menu, which opens with the first run that has an episode."""
    bad = (place for place, each in enumerate(maps) if runs[each["run"]].episodes)
    choices = [each["name"] for each in maps]
    return {"kind": "map", "maps": maps, "choices": choices, "start": next(bad, 0)}


def _members(run: RunRecord, family: str, names: Mapping[str, str]) -> dict[str, Curve]:
    """Return the rows of a family's map; of attention logits one row for each module."""
    whole = {name: member for name, member in names.items() if _LOGITS.fullmatch(name)}
    chosen = whole if family == "max_attention_logit" and whole else names
    return {member: run.curves[name] for name, member in chosen.items()}


def by_rank(runs: Sequence[RunRecord]) -> list[Panel]:
    """Show the ranks of each run with several: losses, norms, and norms by layer in a step."""
    panels = []
    for number, run in enumerate(runs):
        if run.rank_losses:
            note = "Loss of each rank on its own data."
            title = label(run, "Loss of each rank", runs)
            panels.append(_of_ranks(number, "rank-losses", title, note, run.rank_losses))
        if len(run.local_norms) < 2:
            continue
        names = list(next(iter(run.local_norms.values())))
        steps = sorted({s for g in run.local_norms.values() for c in g.values() for s in c.steps})
        # Pick steps from the end backwards, so that the last step is among them.
        steps = steps[:: -math.ceil(len(steps) / _MAX_SLIDER_STEPS)][::-1]
        at = {
            rank: {name: dict(zip(c.steps, c.values, strict=True)) for name, c in groups.items()}
            for rank, groups in run.local_norms.items()
        }
        maps = [
            {
                "run": number,
                "name": str(step),
                "rows": names,
                "x": [f"rank {rank}" for rank in at],
                **_cells([[at[rank].get(name, {}).get(step) for rank in at] for name in names]),
            }
            for step in steps
        ]
        title = label(run, "Local norms by layer and rank", runs)
        note = "Local norms of one step. The slider chooses the step."
        content: dict[str, Any] = {"kind": "ranks", "maps": maps}
        panels.append(Panel(f"ranks-{number}", title, note, content))
        totals = {rank: _total(groups) for rank, groups in run.local_norms.items()}
        note = "L2 norm of all of a rank's own gradients, before they are reduced over ranks."
        title = label(run, "Norm of each rank", runs)
        panels.append(_of_ranks(number, "rank-norms", title, note, totals, log=True))
    return panels


def _of_ranks(
    number: int,
    name: str,
    title: str,
    note: str,
    curves: Mapping[int, Curve],
    *,
    log: bool = False,
) -> Panel:
    """Return a panel with a curve of each rank of a run."""
    shown = list(curves.items())[:_MAX_RANK_CURVES]
    traces = [
        line(number, f"rank {rank}", curve, smooth=True, color=place)
        for place, (rank, curve) in enumerate(shown)
    ]
    more = len(curves) - len(shown)
    rest = f" The other {more} ranks are not drawn." if more else ""
    content = {"kind": "curves", "traces": traces, "log": log, "may_log": True}
    return Panel(f"{name}-{number}", title, note + rest, content)


def _total(groups: Mapping[str, Curve]) -> Curve:
    squares: dict[int, list[float]] = {}
    for curve in groups.values():
        for step, value in zip(curve.steps, curve.values, strict=True):
            squares.setdefault(step, []).append(value)
    steps = sorted(squares)
    return Curve(steps, [math.hypot(*squares[step]) for step in steps])


def _map(
    number: int, name: str, groups: Mapping[str, Curve], columns: int | None = None
) -> dict[str, Any]:
    x, values = binned(groups) if columns is None else binned(groups, columns)
    return {"run": number, "name": name, "rows": list(groups), "x": x, **_cells(values)}


def _cells(values: Sequence[Sequence[float | None]]) -> dict[str, Any]:
    """Return logarithms as integers, with ``None`` for 0, and the cells that are not finite."""
    logs = [
        [round(_SCALE * math.log10(v)) if v is not None and 0 < v < math.inf else None for v in row]
        for row in values
    ]
    bad = [
        [place, column]
        for place, row in enumerate(values)
        for column, v in enumerate(row)
        if v is not None and not math.isfinite(v)
    ]
    return {"z": logs, "bad": bad}
