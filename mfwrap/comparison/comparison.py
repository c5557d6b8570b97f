"""Compare two recorded runs step by step, up to the first difference."""

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, final

from mfwrap.arguments import check_number
from mfwrap.comparison.data import compare_data, compare_random
from mfwrap.comparison.differences import CAUSES, RESULTS, Difference, Kind, Outcome
from mfwrap.comparison.numbers import compare_numbers
from mfwrap.comparison.recorded_run import RecordedRun, read_recorded_run
from mfwrap.comparison.tensors import compare_gradients, compare_starts, compare_weights

_MOST_LATER = 1000
"""Number of steps after the compared ones that are searched for what else both have recorded."""


class Setting(NamedTuple):
    """A setting in which two runs differ; ``None`` where a run does not have it."""

    name: str
    values: tuple[Any, Any]


class Steps(NamedTuple):
    """Steps that a run has recorded."""

    first: int
    last: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What differs first between two runs, and what differed before."""

    names: tuple[str, str]
    """Folders of the runs."""

    tolerance: float
    """Largest relative difference that counted as equal; 0 for equal bits."""

    steps: tuple[int, ...]
    """Steps that were compared: both runs have recorded them. Ends at the first difference."""

    recorded: tuple[Steps, Steps]
    """First and last recorded step of each run."""

    num_ranks: tuple[int, int]
    """Number of ranks of each run, as far as the records show."""

    compared: tuple[Kind, ...]
    """Kinds that were compared in at least one step."""

    differences: tuple[Difference, ...]
    """What the first step with a difference computed differently, in the order in which the step
    computes it. Empty if nothing differs."""

    causes: tuple[Difference, ...]
    """What was given to a step differently, at that step or before, each at its first step. If the
    first difference is in the weights of a start, also what the first step after it was given."""

    last_equal: dict[Kind, int]
    """Last step in which each kind was compared and equal."""

    first_of_any_size: Difference | None
    """With a tolerance, the first difference in the bits; ``None`` if there is none."""

    first_later: Mapping[Kind, int]
    """First step after the compared ones in which both runs have recorded kinds that were not
    compared."""

    settings: tuple[Setting, ...]
    """Settings in which the runs differ."""

    @property
    def is_equal(self) -> bool:
        """Whether neither a step's inputs nor its results differ. Settings do not count."""
        return not self.differences and not self.causes

    def to_record(self) -> dict[str, Any]:
        """Return all fields as plain values that JSON can represent."""
        record = {"is_equal": self.is_equal, **asdict(self)}
        for key in ("recorded", "settings"):
            record[key] = [each._asdict() for each in getattr(self, key)]
        record |= {"num_steps_compared": len(self.steps), "steps": list(self.steps[-1:])}
        exact = record["first_of_any_size"]
        for each in (*record["differences"], *record["causes"], *([exact] if exact else ())):
            each["rows"] = [row._asdict() for row in each["rows"]]
            each["only_in"] = [[row._asdict() for row in rows] for rows in each["only_in"]]
        return record


def compare_runs(first: Path, second: Path, tolerance: float = 0.0) -> Comparison:
    """Find the first step at which two runs differ, by what, and what differed before.

    Compares the steps that both runs have recorded, in order, up to the first one whose results
    differ: loss, gradients, skipped update, optimizer state, weights, evaluation. Random numbers
    and data are compared bit by bit, whatever the tolerance. Reads ``metrics.jsonl``,
    ``training_state.jsonl``, ``local_norms.jsonl``, ``fingerprints.jsonl`` and the log in
    ``trainer_state.json``. If several gradients differ and the losses are equal, the gradient that
    the backward reaches first is named.

    Args:
        first: Run folder.
        second: Run folder.
        tolerance: Largest relative difference of numbers that counts as equal. For tensors the
            difference is the L2 norm of the difference divided by the larger norm, estimated from
            the recorded sketches with an error of about 35 %. A tensor with less than
            `SMALLEST_SHARE` of the norm of all tensors counts as if it had this share. 0 demands
            equal bits.

    Raises:
        FileNotFoundError: If a folder is not a run folder.
        TypeError: If `tolerance` is not a number.
        ValueError: If a file is damaged, the runs have no step in common or nothing in common to
            compare, or `tolerance` is negative or not finite.
    """
    limit = check_number("tolerance", tolerance)
    ours, theirs = read_recorded_run(first), read_recorded_run(second)
    walk = _compare(ours, theirs, limit)
    if not walk.compared:
        raise ValueError(_nothing_in_common(ours, theirs))
    exact = _compare(ours, theirs, 0.0).differences if limit else []
    last = max(walk.steps, default=0)
    return Comparison(
        names=(str(first), str(second)),
        tolerance=limit,
        steps=tuple(walk.steps),
        recorded=(_extent(ours), _extent(theirs)),
        num_ranks=(ours.num_ranks, theirs.num_ranks),
        compared=tuple(kind for kind in (*CAUSES, *RESULTS) if kind in walk.compared),
        differences=tuple(walk.differences),
        causes=tuple(walk.causes[kind] for kind in CAUSES if kind in walk.causes),
        last_equal=walk.last_equal,
        first_of_any_size=exact[0] if exact else None,
        first_later=_first_later(ours, theirs, last, walk.compared),
        settings=tuple(_settings(ours, theirs)),
    )


def _first_later(
    first: RecordedRun, second: RecordedRun, last: int, compared: Collection[Kind]
) -> dict[Kind, int]:
    """Return the first step after the compared ones in which both have kinds that were not."""
    found: dict[Kind, int] = {}
    wanted = {*CAUSES, *RESULTS} - set(compared)
    for step in sorted(step for step in first.steps & second.steps if step > last)[:_MOST_LATER]:
        if wanted <= found.keys():
            break
        kinds = wanted & _compare_step(first, second, step, math.inf).keys()
        found |= dict.fromkeys(kinds - found.keys(), step)
    return found


@dataclass(slots=True)
class _Walk:
    """What was found so far."""

    steps: list[int] = field(default_factory=list)
    compared: set[Kind] = field(default_factory=set)
    causes: dict[Kind, Difference] = field(default_factory=dict)
    last_equal: dict[Kind, int] = field(default_factory=dict)
    differences: list[Difference] = field(default_factory=list)


def _compare(first: RecordedRun, second: RecordedRun, limit: float) -> _Walk:
    """Compare two runs up to the first step whose results differ."""
    walk = _Walk()
    begin = _first_start(first, second, limit)
    for step in sorted(first.steps & second.steps):
        outcome = _compare_step(first, second, step, limit)
        walk.compared |= outcome.keys()
        for kind in CAUSES:
            if (cause := outcome.get(kind)) is not None:
                walk.causes.setdefault(kind, cause)
        if begin is not None and begin.step < step:
            walk.differences = [begin]
            return walk
        if outcome:
            walk.steps.append(step)
        walk.last_equal |= {kind: step for kind, each in outcome.items() if each is None}
        found = [outcome.get(kind) for kind in RESULTS]
        walk.differences = [difference for difference in found if difference is not None]
        if walk.differences:
            return walk
    return walk


def _compare_step(first: RecordedRun, second: RecordedRun, step: int, limit: float) -> Outcome:
    found = compare_numbers(first, second, step, limit)
    found |= compare_random(first, second, step)
    found |= compare_data(first, second, step)
    found |= compare_gradients(first, second, step, limit, found)
    found |= compare_weights(first, second, step, limit)
    return found


def _first_start(first: RecordedRun, second: RecordedRun, limit: float) -> Difference | None:
    """Return the first difference of the weights at which a training of either run started."""
    runs = (*first.fingerprints.values(), *second.fingerprints.values())
    starts = sorted({step for each in runs for step in each.starts})
    found = (compare_starts(first, second, step, limit) for step in starts)
    return next((difference for difference in found if difference is not None), None)


def _extent(run: RecordedRun) -> Steps:
    return Steps(min(run.steps), max(run.steps))


def _nothing_in_common(first: RecordedRun, second: RecordedRun) -> str:
    ours, theirs = _extent(first), _extent(second)
    if not first.steps & second.steps:
        return (
            f"cannot compare {first.folder} and {second.folder}: no step is recorded in both; the "
            f"first has steps {ours.first} to {ours.last}, the second {theirs.first} to "
            f"{theirs.last}"
        )
    return (
        f"cannot compare {first.folder} and {second.folder}: they have recorded different numbers; "
        "record both with the same monitors"
    )


def _settings(first: RecordedRun, second: RecordedRun) -> list[Setting]:
    """Return the settings that differ, each once; facts only if both runs have them."""
    found = []
    if first.recipe and second.recipe:
        keys = dict.fromkeys((*first.recipe, *second.recipe))
        found = _differing(keys, first.recipe, second.recipe)
    # A recipe may have set a fact, such as the seed.
    told = {(each.name.rpartition(".")[2], str(each.values)) for each in found}
    facts = _differing((k for k in first.facts if k in second.facts), first.facts, second.facts)
    return [each for each in facts if (each.name, str(each.values)) not in told] + found


def _differing(
    keys: Iterable[str], first: Mapping[str, Any], second: Mapping[str, Any]
) -> list[Setting]:
    settings = (Setting(key, (first.get(key), second.get(key))) for key in keys)
    return [each for each in settings if each.values[0] != each.values[1]]
