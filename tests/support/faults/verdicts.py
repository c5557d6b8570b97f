"""Compare what the monitor has recorded with what is expected of a fault, and count."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from support.faults.expectation import Expectation
from support.faults.twin import Class

__all__ = ["Verdict", "judge", "table"]

_UNKNOWN = {None, "unknown"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """How the records of a run compare with what is expected of its fault."""

    kind: str
    class_: str
    recorded: bool
    """Whether there is a record in time."""

    right_cause: bool
    """Whether a record in time names a right cause, and none a wrong one."""

    wrong_causes: tuple[str, ...]
    """Causes that a record from the fault on names, and that are not right."""

    wrong_places: tuple[str, ...]
    """What a record from the fault on says against the fault's place: ``"layer"``, ``"ranks"``,
    ``"micro_batch"`` or ``"rows"``."""

    false_alarms: int
    """Number of episodes before the fault."""

    twin_alarms: int
    """Number of episodes of the twin."""

    lost: str | None = None
    """The error with which the run has ended."""


def judge(
    kind: str,
    class_: Class,
    expected: Expectation,
    records: Sequence[Mapping[str, Any]],
    twin_records: Sequence[Mapping[str, Any]] = (),
    *,
    has_diverged: bool = False,
) -> Verdict:
    """Compare the records of a run with what is expected of its fault.

    Args:
        kind: Kind of the fault.
        class_: Class of the fault.
        expected: What is expected.
        records: Records of ``anomalies.jsonl`` of all ranks, in the order of their steps.
        twin_records: Records of the twin.
        has_diverged: Whether the loss has left its course for good, so that a record may say so.
    """
    right = set(expected.causes)
    neutral = set(_UNKNOWN)
    if has_diverged:
        (right if expected.may_diverge else neutral).add("diverged")
    # What the twin has, too, is not of the fault.
    of_twin = {(one["step"], one["kind"]) for one in twin_records}
    later = [
        one
        for one in records
        if one["step"] >= expected.step and (one["step"], one["kind"]) not in of_twin
    ]
    found = [one for one in later if one["step"] <= expected.last_step]
    wrong = {cause for one in later for cause in _causes(one, right)} - neutral - right
    named = {cause for one in found for cause in _causes(one, right)} & right
    return Verdict(
        kind=kind,
        class_=str(class_),
        recorded=bool(found),
        right_cause=bool(named) and not wrong,
        wrong_causes=tuple(sorted(wrong)),
        wrong_places=tuple(
            sorted({name for one in later for name in _wrong_places(one, expected)})
        ),
        false_alarms=sum(one["step"] < expected.step for one in _begun(records)),
        twin_alarms=len(_begun(twin_records)),
    )


def _begun(records: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return the records with which episodes begin."""
    return [one for one in records if "last_step" not in one]


def _causes(record: Mapping[str, Any], right: set[Any]) -> set[Any]:
    """Return the causes that a record names. Of several, it says that one of them is true."""
    cause = record.get("cause")
    if not isinstance(cause, (list, tuple)):
        return {cause}
    return set(cause) & right or set(cause)


def _wrong_places(record: Mapping[str, Any], expected: Expectation) -> set[str]:
    """Return what a record says against the place of a fault.

    A layer or a row is wrong, too, if the fault has none: then it is in all of them, or in none.
    All ranks and micro-batches have a fault that is in none of them alone.
    """
    wrong = set()
    layer = record.get("layer")
    if layer is not None and not any(_overlap(layer, place) for place in expected.places):
        wrong.add("layer")
    ranks = record.get("ranks")
    if expected.rank is not None and ranks is not None and ranks != [expected.rank]:
        wrong.add("ranks")
    micro_batch = record.get("micro_batch")
    if micro_batch is not None and expected.micro_batch not in {None, micro_batch}:
        wrong.add("micro_batch")
    rows = _rows(record, expected)
    if rows is not None and not expected.has_any_row and rows != expected.rows:
        wrong.add("rows")
    return wrong


def _overlap(layer: str, place: str) -> bool:
    """Return whether one of two names is that of a part of the other."""
    return f"{place}.".startswith(f"{layer}.") or f"{layer}.".startswith(f"{place}.")


def _rows(record: Mapping[str, Any], expected: Expectation) -> tuple[int, ...] | None:
    """Return the rows that a record names.

    The samples of a record are those that stand out, which is wrong only if others have the fault.
    """
    rows = record.get("rows")
    if rows is not None:
        return tuple(rows)
    samples = record.get("samples")
    if expected.rows is None or not samples:
        return None
    return tuple(sorted({each["row"] for each in samples}))


def table(verdicts: Iterable[Verdict]) -> str:
    """Return the counts by class and by kind as tables in Markdown."""
    verdicts = list(verdicts)
    classes = {str(each): [one for one in verdicts if one.class_ == each] for each in Class}
    kinds: dict[str, list[Verdict]] = {}
    for one in sorted(verdicts, key=lambda one: one.kind):
        kinds.setdefault(one.kind, []).append(one)
    return "\n\n".join([_table("class", classes | {"all": verdicts}), _table("kind", kinds)])


def _table(title: str, groups: Mapping[str, Sequence[Verdict]]) -> str:
    columns = (
        "faults",
        "in time",
        "right cause",
        "wrong cause",
        "wrong place",
        "false alarms",
        "twins' alarms",
        "lost",
    )
    lines = [f"| {title} | {' | '.join(columns)} |", f"| --- |{' --- |' * len(columns)}"]
    for name, group in groups.items():
        if group:
            counts = (
                len(group),
                sum(one.recorded for one in group),
                sum(one.right_cause for one in group),
                sum(bool(one.wrong_causes) for one in group),
                sum(bool(one.wrong_places) for one in group),
                sum(one.false_alarms for one in group),
                sum(one.twin_alarms for one in group),
                sum(one.lost is not None for one in group),
            )
            lines.append(f"| {name} | {' | '.join(map(str, counts))} |")
    return "\n".join(lines)
