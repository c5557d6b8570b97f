"""Compare the fingerprints of gradients and weights of two runs."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

from mfwrap.comparison.differences import (
    SMALLEST_SHARE,
    Difference,
    Kind,
    Outcome,
    Pairs,
    difference_of,
    first_in_backward,
)
from mfwrap.comparison.recorded_run import RecordedRun
from mfwrap.records.fingerprints import Fingerprint, RankFingerprints

_Tensors: TypeAlias = Mapping[str, Fingerprint]


def compare_gradients(
    first: RecordedRun, second: RecordedRun, step: int, tolerance: float, numbers: Outcome
) -> Outcome:
    """Compare the gradients of a step, and name the gradient where the difference began.

    Args:
        first: One run.
        second: The other run.
        step: Number of the step.
        tolerance: Largest relative difference that counts as equal.
        numbers: Outcome of comparing the numbers of the step. Local norms in it show on which rank
            a gradient differed before it was reduced.
    """
    unscaled = {
        each.are_unscaled
        for run in (first, second)
        for each in run.fingerprints_of(step).values()
        if each.gradients is not None
    }
    if len(unscaled) == 2 or (numbers.get("loss scale") is not None and unscaled != {True}):
        return {}  # the recorded gradients are multiplied by different numbers
    pairs = _pairs(first, second, lambda each: _of_step(each, step, is_weight=False))
    differing = _differing(pairs, tolerance)
    if not differing:
        return {"gradient": None} if pairs and "gradient" not in numbers else {}
    names = list(dict.fromkeys(name for name, _ in differing))
    has_loss = "loss" in numbers and numbers["loss"] is None
    name = first_in_backward(names, len({name for name, _ in pairs}), can_name=has_loss)
    found = _difference(step, "gradient", pairs, differing, name)
    norms = numbers.get("gradient")
    if name is None and norms is not None and norms.name in {key for key, _ in pairs}:
        # The gradients were recorded after clipping, which changes all of them.
        return {}
    if norms is not None and norms.ranks:
        found = dataclasses.replace(found, ranks=norms.ranks)
    return {"gradient": found}


def compare_weights(
    first: RecordedRun, second: RecordedRun, step: int, tolerance: float
) -> Outcome:
    """Compare the weights after the update of a step."""
    pairs = _pairs(first, second, lambda each: _of_step(each, step, is_weight=True))
    return {"weight": _weight_difference(step, pairs, tolerance)} if pairs else {}


def compare_starts(
    first: RecordedRun, second: RecordedRun, step: int, tolerance: float
) -> Difference | None:
    """Compare the weights with which trainings started after `step` steps.

    If only one run started there, its weights are compared with the other run's after that step.

    Returns:
        The difference; ``None`` if the weights are equal or not recorded.
    """

    def at_start(each: RankFingerprints) -> _Tensors | None:
        return each.starts.get(step) or _of_step(each, step, is_weight=True)

    found = _weight_difference(step, _pairs(first, second, at_start), tolerance)
    return None if found is None else dataclasses.replace(found, at_start=True)


def _of_step(each: RankFingerprints, step: int, *, is_weight: bool) -> _Tensors | None:
    found = each.steps.get(step)
    if found is None:
        return None
    return found.weights if is_weight else found.gradients


def _pairs(
    first: RecordedRun,
    second: RecordedRun,
    choose: Callable[[RankFingerprints], _Tensors | None],
) -> Pairs[Fingerprint]:
    """Return the fingerprints that both runs have, by rank.

    If the runs divide the tensors differently, those of whole tensors are returned under rank 0.
    """
    ours, theirs = (
        {rank: found for rank, each in run.fingerprints.items() if (found := choose(each))}
        for run in (first, second)
    )
    both = ours.keys() & theirs.keys()
    if first.num_ranks != second.num_ranks or any(
        first.fingerprints[rank].shares != second.fingerprints[rank].shares for rank in both
    ):
        ours, theirs, both = {0: _merged(first, ours)}, {0: _merged(second, theirs)}, {0}
    return {
        (name, rank): (one, theirs[rank][name])
        for rank in sorted(both)
        for name, one in ours[rank].items()
        if name in theirs[rank]
    }


def _merged(run: RecordedRun, by_rank: Mapping[int, _Tensors]) -> _Tensors:
    """Return the fingerprints of whole tensors: those of the first rank, or the sum of parts."""
    found: dict[str, Fingerprint] = {}
    for rank, fingerprints in sorted(by_rank.items()):
        for name, one in fingerprints.items():
            share = run.fingerprints[rank].shares[name]
            if share == "whole":
                found.setdefault(name, one)
            elif share == "part":
                found[name] = found[name].plus(one) if name in found else one
    return found


def _differing(pairs: Pairs[Fingerprint], tolerance: float) -> list[tuple[str, int]]:
    differing = {key: pair for key, pair in pairs.items() if pair[0].hash != pair[1].hash}
    if not tolerance:
        return list(differing)
    least = _least_squares(pairs)
    return [
        (name, rank)
        for (name, rank), (one, other) in differing.items()
        if one.relative_distance(other, least[rank]) > tolerance
    ]


def _least_squares(pairs: Pairs[Fingerprint]) -> dict[int, float]:
    """Return, by rank, the square of the norm that a smaller norm of a tensor counts as."""
    totals: dict[int, float] = {}
    for (_, rank), pair in pairs.items():
        square = max(each.square for each in pair)
        totals[rank] = totals.get(rank, 0.0) + (square if math.isfinite(square) else 0.0)
    return {rank: SMALLEST_SHARE**2 * total for rank, total in totals.items()}


def _weight_difference(step: int, pairs: Pairs[Fingerprint], tolerance: float) -> Difference | None:
    differing = _differing(pairs, tolerance)
    if not differing:
        return None
    names = list(dict.fromkeys(name for name, _ in differing))
    is_all = len(names) == len({name for name, _ in pairs})
    name = None if is_all and len(names) > 1 else names[0]
    return _difference(step, "weight", pairs, differing, name)


def _difference(
    step: int,
    kind: Kind,
    pairs: Pairs[Fingerprint],
    differing: Sequence[tuple[str, int]],
    name: str | None,
) -> Difference:
    # Of several tensors, the smallest ones may differ by their rounding errors alone.
    least = _least_squares(pairs) if name is None else {}
    relative = [
        pairs[key][0].relative_distance(pairs[key][1], least.get(key[1], 0.0))
        for key in differing
        if name in {None, key[0]}
    ]
    return difference_of(step, kind, differing, pairs, name=name, relative=max(relative))
