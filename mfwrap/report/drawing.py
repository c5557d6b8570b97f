"""Describe the panels of a run page as data, which the page's program draws."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from mfwrap.records.run_record import Curve, RunRecord
from mfwrap.report.curves import COLORS, thinned, to_smooth

_DIGITS = 5
"""Significant digits of a number in the page."""


class Panel(NamedTuple):
    """A figure with its heading and explanation."""

    name: str
    """Identifier in the page."""

    title: str
    note: str
    """What the figure shows, as HTML."""

    content: dict[str, Any]
    """What the page's program draws, ready for JSON. Its ``kind`` is ``"curves"``, ``"map"`` or
    ``"ranks"``; ``choices``, if there are several, are the entries of a menu."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to draw."""
        return not (self.content.get("traces") or self.content.get("maps"))


def color_of(number: int) -> str:
    """Return the color of the run with index `number`."""
    return COLORS[number % len(COLORS)]


def label(run: RunRecord, what: str, runs: Sequence[RunRecord]) -> str:
    """Return the name of a trace; it includes the run's name if there are several runs."""
    return f"{run.name}: {what}" if len(runs) > 1 else what


def line(number: int, name: str, curve: Curve, **settings: Any) -> dict[str, Any]:
    """Describe a curve as a line with gaps at non-finite values; long lines are thinned.

    Args:
        number: Index of the run.
        name: What the line is.
        curve: The numbers.
        settings: Further fields: ``choice`` (an entry of the panel's menu), ``weights`` (``"raw"``
            or ``"averaged"``), ``shape`` (``"hv"`` for steps), ``symbol`` (Plotly's name of the
            marker that is drawn at each step in the place of a line), ``smooth`` (whether the
            reader may smooth the line), ``color`` (by default that of the run).
    """
    shown = curve if "symbol" in settings else thinned(curve)
    found = {"run": number, "name": name, **settings}
    found |= {"x": shown.steps, "y": numbers(shown.values)}
    if settings.get("smooth") and (mean := to_smooth(curve)) is not curve:
        found["means"] = {"x": mean.steps, "y": numbers(mean.values)}
    bad = [s for s, v in zip(curve.steps, curve.values, strict=True) if not math.isfinite(v)]
    if bad:
        found["bad"] = bad
    return found


def lines(runs: Sequence[RunRecord], key: str, what: str, **settings: Any) -> list[dict[str, Any]]:
    """Describe the curve `key` of each run that has it; see `line`."""
    return [
        line(number, label(run, what, runs), curve, **settings)
        for number, run in enumerate(runs)
        if (curve := run.curves.get(key))
    ]


def numbers(values: Any) -> list[float | None]:
    """Return numbers with 5 significant digits, and ``None`` for those that are not finite."""
    return [rounded(value) if math.isfinite(value) else None for value in values]


def rounded(value: float) -> float | int:
    """Return a number with 5 significant digits, as an integer if it is one."""
    short = float(f"{value:.{_DIGITS}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short
