"""Compare the numbers that two runs have recorded about a step."""

import math
from collections.abc import Mapping

from mfwrap.comparison.differences import (
    SMALLEST_SHARE,
    Difference,
    Kind,
    Outcome,
    Pairs,
    difference_of,
    first_in_backward,
)
from mfwrap.comparison.recorded_run import SOURCES, TRAINER_LOG, RecordedRun
from mfwrap.records.evaluations import AVERAGED, TIMINGS

_LOCAL_NORM = "local_norm/"

_NAMES: Mapping[Kind, tuple[str, ...]] = {
    "loss scale": ("loss_scale",),
    "learning rate": ("learning_rate",),
    "loss": ("loss",),
    "forward pass": ("max_attention_logit", "expert_load", "expert_imbalance", "drop_rate"),
    "gradient": ("local_norm", "device_local_norm", "global_norm"),
    "skipped update": ("overflow", "overflows", "skipped", "skipped_updates", "consecutive_skips"),
    "optimizer state": ("adam_m_norm", "adam_v_norm"),
    "weight": ("weight_norm", "weight_stable_rank", "weight_eigenvalue", "expert_bias_spread"),
}
"""Numbers of each kind, by their names or by the part of their names before ``/``. Other numbers
are not compared: most of them are times."""

_KIND_OF_NAME = {name: kind for kind, names in _NAMES.items() for name in names}

_OF_ALL_RANKS = {"learning rate", "loss scale", "skipped update", "evaluation"}
"""Kinds whose numbers are the same on all ranks, however many there are."""

_OF_ALL_SHARDS = {"global_norm", "weight_norm"}
"""Numbers of other kinds that are the same on all ranks."""


def compare_numbers(
    first: RecordedRun, second: RecordedRun, step: int, tolerance: float
) -> Outcome:
    """Compare the numbers of a step. A number counts if both runs have it from the same source.

    If the runs have different numbers of ranks, only numbers that do not depend on the number of
    ranks are compared, and the means of all ranks' losses.
    """
    found: Outcome = {}
    pairs, are_ordered = _number_pairs(first, second, step)
    for kind, numbers in pairs.items():
        limit = 0.0 if kind == "skipped update" else tolerance
        least = _least_norms(numbers) if limit else {}
        differing = {
            key: values
            for key, values in numbers.items()
            if not is_close(*values, limit, least.get(_family(*key), 0.0))
        }
        found[kind] = None
        if differing:
            has_loss = "loss" in found and found["loss"] is None
            found[kind] = _difference(
                step, kind, differing, numbers, can_name=has_loss and are_ordered
            )
    if found.get("skipped update") is not None:
        # The scale changes after an overflow, so here it is a result and not a cause.
        found.pop("loss scale", None)
    return found


def is_close(first: float, second: float, tolerance: float, least: float = 0.0) -> bool:
    """Return whether two numbers are equal, or differ by at most the relative tolerance.

    Args:
        first: One number.
        second: The other number.
        tolerance: Largest relative difference.
        least: Magnitude that a smaller magnitude counts as.
    """
    if first == second or (math.isnan(first) and math.isnan(second)):
        return True
    return _relative(first, second, least) <= tolerance


def _family(name: str, rank: int) -> tuple[str, int]:
    """Return what the norms of the parts of one network have in common."""
    return name.partition("/")[0], rank


def _least_norms(numbers: Pairs[float]) -> dict[tuple[str, int], float]:
    """Return the norm that a smaller norm of a layer or parameter counts as, by family."""
    squares: dict[tuple[str, int], float] = {}
    for (name, rank), values in numbers.items():
        family = _family(name, rank)
        if "/" in name and family[0].endswith("_norm"):
            square = max(value * value for value in values)
            squares[family] = squares.get(family, 0.0) + (square if math.isfinite(square) else 0.0)
    return {family: SMALLEST_SHARE * math.sqrt(square) for family, square in squares.items()}


def _relative(first: float, second: float, least: float = 0.0) -> float:
    larger = max(abs(first), abs(second), least)
    relative = abs(first - second) / larger if larger and math.isfinite(larger) else math.inf
    return math.inf if math.isnan(relative) else relative


def _number_pairs(
    first: RecordedRun, second: RecordedRun, step: int
) -> tuple[dict[Kind, Pairs[float]], bool]:
    """Return the numbers of a step that both runs have, by kind; the losses come first.

    Returns:
        The numbers, and whether the local norms are in the order of the network. The Trainer's file
        sorts them.
    """
    found: dict[Kind, Pairs[float]] = {"loss": {}}
    are_ordered = True
    is_same = first.num_ranks == second.num_ranks
    for source in SOURCES:
        ours, theirs = first.numbers.get(source, {}), second.numbers.get(source, {})
        for rank in sorted(ours.keys() & theirs.keys()):
            numbers, others = ours[rank].get(step, {}), theirs[rank].get(step, {})
            for name in numbers:
                kind = _kind(name)
                if kind is None or name not in others:
                    continue
                if is_same or (rank == 0 and (kind in _OF_ALL_RANKS or name in _OF_ALL_SHARDS)):
                    pairs = found.setdefault(kind, {})
                    if (name, rank) not in pairs:
                        pairs[name, rank] = (numbers[name], others[name])
                        is_norm = name.startswith(_LOCAL_NORM)
                        are_ordered &= not (is_norm and source == TRAINER_LOG)
        if not is_same and not found["loss"]:
            means = _mean_loss(first, source, step), _mean_loss(second, source, step)
            if means[0] is not None and means[1] is not None:
                found["loss"]["loss", 0] = (means[0], means[1])
    return {kind: pairs for kind, pairs in found.items() if pairs}, are_ordered


def _kind(name: str) -> Kind | None:
    if name.startswith(("eval_", f"{AVERAGED}eval_")):
        return None if name.endswith(TIMINGS) else "evaluation"
    return _KIND_OF_NAME.get(name.partition("/")[0])


def _mean_loss(run: RecordedRun, source: str, step: int) -> float | None:
    """Return the mean of all ranks' losses; ``None`` if a rank has not recorded its loss."""
    by_rank = run.numbers.get(source, {})
    losses = [steps[step]["loss"] for steps in by_rank.values() if "loss" in steps.get(step, {})]
    return sum(losses) / len(losses) if len(losses) == run.num_ranks else None


def _difference(
    step: int, kind: Kind, differing: Pairs[float], compared: Pairs[float], *, can_name: bool
) -> Difference:
    """Describe the numbers of one kind that differ.

    Args:
        step: Number of the step.
        kind: Kind of the numbers.
        differing: Numbers that differ.
        compared: Numbers that were compared.
        can_name: Whether a layer can be named by the order of the local norms.
    """
    # Norms of all parameters together say less than those of one parameter or layer.
    norms = {key: each for key, each in differing.items() if key[0].startswith(_LOCAL_NORM)}
    if norms:
        differing = norms
        compared = {k: v for k, v in compared.items() if k[0].startswith(_LOCAL_NORM)}
    names = list(dict.fromkeys(name for name, _ in differing))
    name: str | None = names[0]
    if norms:
        name = first_in_backward(names, len({name for name, _ in compared}), can_name=can_name)
    largest = max(
        (each for key, each in differing.items() if name in {None, key[0]}),
        key=lambda each: _relative(*each),
    )
    return difference_of(
        step,
        kind,
        differing,
        compared,
        name=None if name is None else name.removeprefix(_LOCAL_NORM),
        values=largest,
        relative=_relative(*largest),
    )
