"""Say in plain sentences what a comparison of two runs found."""

from collections.abc import Iterator, Sequence

import numpy as np

from mfwrap.comparison.comparison import Comparison, Setting
from mfwrap.comparison.differences import CAUSES, RESULTS, Difference, Kind, Row

_MAX_LISTED = 5
"""Rows and settings that are listed; of the others, the number is printed."""

_PLURAL: dict[Kind, str] = {
    "random numbers": "random numbers",
    "data": "data",
    "loss": "losses",
    "forward pass": "numbers of the forward pass",
}
"""Plural of each kind that does not only get an "s"."""

_EXPECTED: tuple[Kind, ...] = ("random numbers", "data", "loss", "gradient", "weight")
"""Kinds without which the first difference may be found too late."""


def sentences(comparison: Comparison) -> Iterator[str]:
    """Yield the lines that ``mfwrap compare`` prints, the most important line first."""
    pair = " and ".join(comparison.names)
    if comparison.differences:
        yield f"{pair}: {_headline(comparison.differences[0], comparison.names)}"
    elif comparison.causes:
        yield (
            f"{pair} have the same results{_within(comparison)} in {_steps(comparison)}, but their "
            "steps were not given the same."
        )
    else:
        more = f" by more than {comparison.tolerance:g}" if comparison.tolerance else ""
        yield f"{pair} do not differ{more} in {_steps(comparison)}."
    for cause in comparison.causes:
        yield _cause(cause, comparison.names)
    if comparison.differences:
        yield from _conclusions(comparison)
    yield from _equal(comparison)
    if comparison.first_of_any_size is not None:
        yield f"Bit by bit, {_headline(comparison.first_of_any_size, comparison.names)}"
    yield from _settings(comparison.settings)
    yield from _notes(comparison)


def _within(comparison: Comparison) -> str:
    return f" within {comparison.tolerance:g}" if comparison.tolerance else ""


def _steps(comparison: Comparison) -> str:
    steps = comparison.steps
    if len(steps) == 1:
        return f"step {steps[0]}, the only step that both recorded"
    return f"the {len(steps)} steps from {steps[0]} to {steps[-1]} that both recorded"


def _headline(found: Difference, names: tuple[str, str]) -> str:
    """Return the sentence about a difference: the step, and what differs first."""
    where = f" on {_ranks(found.ranks)}" if found.ranks else ""
    amount = ""
    if found.values is not None:
        one, other = map(_number, found.values)
        amount = f" ({one} in {names[0]}, {other} in {names[1]})"
    elif found.relative is not None:
        amount = f" (relative difference about {found.relative:.1g})"
    if found.at_start:
        start = f"after step {found.step}, where a training started, the" if found.step else "the"
        initial = "" if found.step else " initial"
        return f"{start}{initial} weights differ{where}: {_share(found)}{amount}."
    if found.kind in {"gradient", "weight"} and found.num_compared > 1:
        what = f"the {_plural(found.kind)} differ{where}: {_share(found)}{amount}"
    else:
        name = f"the {found.kind}" if found.name in {None, found.kind} else str(found.name)
        what = f"{name} differs{where}{amount}"
    return f"step {found.step} is the first step that differs. There, {what}."


def _share(found: Difference) -> str:
    """Return which tensors differ: ``layers.1.weight alone``, ``3 of 6, first layers.1.weight``."""
    number, total = found.num_differing, found.num_compared
    if number == total:
        return f"all {total}" if total > 1 else str(found.name)
    if number == 1:
        return f"{found.name} alone, of {total}"
    return f"{number} of {total}" + ("" if found.name is None else f", first {found.name}")


def _cause(cause: Difference, names: tuple[str, str]) -> str:
    where = f" of {_ranks(cause.ranks)}" if cause.ranks else ""
    if cause.kind == "random numbers":
        return f"The random numbers{where} differ from the start of step {cause.step} on."
    if cause.kind == "data":
        return f"The data{where} differ from step {cause.step} on{_rows(cause, names)}."
    one, other = ("?", "?") if cause.values is None else map(_number, cause.values)
    if cause.kind == "loss scale":
        return f"The loss scale after step {cause.step} differs: {one} and {other}."
    return f"The {cause.kind} differs from step {cause.step} on: {one} and {other}."


def _rows(cause: Difference, names: tuple[str, str]) -> str:
    inputs = "" if cause.name is None else f": {cause.name}"
    if cause.is_other_order:
        return f"{inputs}; the batches have the same rows in another order"
    if len(cause.rows) == cause.num_rows > 1:
        return f"{inputs}; all {cause.num_rows} rows"
    if cause.rows:
        return f"{inputs}; {_places(cause.rows)}"
    both = zip(names, cause.only_in, strict=True)
    only = [f"only in {name}: {_places(rows)}" for name, rows in both if rows]
    return "; ".join(["", *only])


def _places(rows: Sequence[Row]) -> str:
    shown = [
        f"row {each.row} of micro-batch {each.micro_batch} of rank {each.rank}"
        for each in rows[:_MAX_LISTED]
    ]
    return _with_more(shown, len(rows))


def _conclusions(comparison: Comparison) -> Iterator[str]:
    """Yield what follows from the order in which a step computes its results."""
    found, *others = comparison.differences
    if others:
        yield f"At the same step, {_listed([_plural(each.kind) for each in others])} differ, too."
    if comparison.causes or found.at_start:
        return
    equal = comparison.last_equal
    has_inputs = all(equal.get(kind) == found.step for kind in ("data", "random numbers"))
    if found.kind == "loss" and has_inputs and equal.get("weight", 0) == found.step - 1:
        yield (
            f"Weights, data and random numbers of the step are equal{_within(comparison)}: the "
            "forward pass or the loss itself differs, by other code, another device or a "
            "non-deterministic kernel."
        )
    if found.kind == "gradient":
        if found.name is None and found.num_differing == found.num_compared > 1:
            yield "All gradients differ, so no layer is named."
        elif found.num_differing > 1 and found.name is not None:
            yield "Backward reaches this gradient first, of those that differ."
    if found.kind == "weight" and equal.get("gradient") == found.step:
        if comparison.tolerance:
            yield (
                f"The gradients of the step are equal within {comparison.tolerance:g}: the update "
                "or something after it differs, or the optimizer has enlarged small differences, "
                "as Adam does where gradients are near zero."
            )
        else:
            yield "The gradients of the step are equal: the update or something after it differs."


def _equal(comparison: Comparison) -> Iterator[str]:
    """Yield until which step the compared kinds were equal."""
    differing = {each.kind for each in comparison.causes}
    steps: dict[int, list[str]] = {}
    for kind in (*CAUSES, *RESULTS):
        if kind in comparison.last_equal and kind not in differing:
            steps.setdefault(comparison.last_equal[kind], []).append(_plural(kind))
    for step, kinds in sorted(steps.items(), reverse=True):
        yield f"Equal{_within(comparison)} up to step {step}: {_listed(kinds)}."


def _settings(settings: Sequence[Setting]) -> Iterator[str]:
    if settings:
        shown = [
            f"{each.name} ({_setting(each.values[0])} and {_setting(each.values[1])})"
            for each in settings[:_MAX_LISTED]
        ]
        yield f"Settings that differ: {_with_more(shown, len(settings))}."


def _notes(comparison: Comparison) -> Iterator[str]:
    (first, second), (ours, theirs) = comparison.names, comparison.recorded
    if not comparison.differences and ours != theirs:
        yield (
            f"{first} has records of steps {ours.first} to {ours.last}, {second} of steps "
            f"{theirs.first} to {theirs.last}."
        )
    if comparison.num_ranks[0] != comparison.num_ranks[1]:
        yield (
            f"Numbers of ranks: {comparison.num_ranks[0]} and {comparison.num_ranks[1]}. Numbers "
            "of single ranks are not compared, and sums over ranks are rounded differently: use "
            "--tolerance."
        )
    yield from _not_compared(comparison)


def _not_compared(comparison: Comparison) -> Iterator[str]:
    """Yield what would show more, if it were recorded in the compared steps."""
    if any(found.at_start for found in comparison.differences):
        return  # nothing is compared after that
    later = comparison.first_later
    expected = [kind for kind in _EXPECTED if kind not in comparison.compared]
    if comparison.num_ranks[0] != comparison.num_ranks[1]:
        expected = [kind for kind in expected if kind != "random numbers"]
    for step in sorted({later[kind] for kind in expected if kind in later}):
        kinds = _listed([_plural(kind) for kind in expected if later.get(kind) == step])
        yield (
            f"Not recorded in the compared steps: {kinds}, which both runs have from step {step} "
            "on; step_interval=1 records each step."
        )
    if never := [_plural(kind) for kind in expected if kind not in later]:
        yield (
            f"Not recorded in both runs: {_listed(never)}. TrainingStateMonitor records them with "
            "fingerprints=True."
        )


def _plural(kind: Kind) -> str:
    return _PLURAL.get(kind, f"{kind}s")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {_listed([str(rank) for rank in ranks])}"


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else "".join(words)


def _with_more(shown: Sequence[str], total: int) -> str:
    return ", ".join(shown) + (f" and {total - len(shown)} more" if total > len(shown) else "")


def _number(value: float) -> str:
    """Return a number with the fewest digits that identify it; most numbers are float32."""
    with np.errstate(over="ignore"):
        short = np.float32(value)
    return str(short) if float(short) == value else repr(value)


def _setting(value: object) -> str:
    return "not set" if value is None else str(value)
