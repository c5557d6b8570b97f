"""Compare what the monitor has recorded with the truth about a fault, and count over a campaign."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from support.faults.kinds import KINDS, Truth

__all__ = ["Verdict", "judge", "table"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How the records of a run compare with the truth about its fault."""

    kind: str
    finite: bool
    held_out: bool
    at_once: bool
    """Whether there is a record at the step of the fault or the next one, or some steps later for a
    kind that grows."""

    recorded: bool
    """Whether there is a record in time: at once, or up to the next sample for a kind that samples
    may show."""

    exact: bool
    """Whether one of these records names every place that the truth has: layer, rank, micro-batch,
    rows."""

    right_cause: bool
    """Whether all causes that these records name are true, and there is one."""

    wrong: tuple[str, ...]
    """What any record from the step of the fault on says against the truth: ``"layer"``,
    ``"ranks"``, ``"micro_batch"``, ``"rows"``, ``"cause"``."""

    false_alarms: int
    """Number of records before the fault."""


def judge(kind: str, truth: Truth, records: Sequence[Mapping[str, Any]]) -> Verdict:
    """Compare the records of a run with the truth about its fault.

    Args:
        kind: Kind of the fault.
        truth: Truth about it.
        records: Records of ``anomalies.jsonl``, in the order of their steps.
    """
    places: dict[str, Any] = {
        "layer": truth.layer,
        "ranks": None if truth.rank is None else [truth.rank],
        "micro_batch": truth.micro_batch,
        "rows": None if truth.rows is None else list(truth.rows),
    }
    known = {name: place for name, place in places.items() if place is not None}
    # A layer, or a row, is wrong, too, if the fault has none. All ranks and micro-batches have a
    # fault that is in none of them alone.
    firm = {name: places[name] for name in places if name in known or name in {"layer", "rows"}}
    later = [_with_rows(one, truth) for one in records if one["step"] >= truth.step]
    found = [one for one in later if one["step"] <= truth.last_step]
    wrong = {
        name
        for one in later
        for name, place in firm.items()
        if one.get(name) is not None and one[name] != place
    }
    causes = {one.get("cause") for one in found} - {None, "unknown"}
    if causes - set(truth.causes):
        wrong.add("cause")
    return Verdict(
        kind=kind,
        finite=truth.finite,
        held_out=KINDS[kind].held_out,
        at_once=any(one["step"] <= truth.at_once for one in found),
        recorded=bool(found),
        exact=not wrong & set(firm)
        and any(all(one.get(name) == place for name, place in known.items()) for one in found),
        right_cause=bool(causes) and causes <= set(truth.causes),
        wrong=tuple(sorted(wrong)),
        false_alarms=len(records) - len(later),
    )


def _with_rows(record: Mapping[str, Any], truth: Truth) -> Mapping[str, Any]:
    """Return a record with the samples of a micro-batch in its ``rows``, if the fault is in rows.

    Without a fault in rows, the samples of a record are those that stand out, which is not wrong.
    """
    samples = record.get("samples")
    if truth.rows is None or not samples or record.get("rows") is not None:
        return record
    first = samples[0]["micro_batch"]
    rows = sorted(each["row"] for each in samples if each["micro_batch"] == first)
    return {"micro_batch": first, **record, "rows": rows}


def table(verdicts: Iterable[Verdict]) -> str:
    """Return the counts by kind as a table in Markdown, with a line for each half at the end."""
    verdicts = list(verdicts)
    lines = [
        "| fault | runs | at once | in time | exact | right cause | wrong name | false alarms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    groups = {
        kind + (" (held out)" if KINDS[kind].held_out else ""): [
            one for one in verdicts if one.kind == kind
        ]
        for kind in KINDS
    }
    for half, finite in (("finite", True), ("non-finite", False)):
        of_half = [one for one in verdicts if one.finite == finite]
        groups[f"all {half}"] = of_half
        groups[f"all {half}, held out"] = [one for one in of_half if one.held_out]
    for name, group in groups.items():
        if group:
            counts = [
                len(group),
                sum(one.at_once for one in group),
                sum(one.recorded for one in group),
                sum(one.exact for one in group),
                sum(one.right_cause for one in group),
                sum(bool(one.wrong) for one in group),
                sum(one.false_alarms for one in group),
            ]
            lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)
