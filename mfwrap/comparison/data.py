"""Compare the data and the random numbers that two runs gave to a step."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from mfwrap.comparison.differences import Difference, Outcome, Pairs, Row, difference_of
from mfwrap.comparison.recorded_run import RecordedRun
from mfwrap.records.fingerprints import StepFingerprints


def compare_random(first: RecordedRun, second: RecordedRun, step: int) -> Outcome:
    """Compare the random number generators at the start of a step, rank by rank.

    Runs with different numbers of ranks are not compared.
    """
    ours, theirs = first.fingerprints_of(step), second.fingerprints_of(step)
    if first.num_ranks != second.num_ranks:
        return {}
    pairs: Pairs[str] = {
        (name, rank): (state, theirs[rank].random[name])
        for rank, each in ours.items()
        if rank in theirs
        for name, state in each.random.items()
        if name in theirs[rank].random
    }
    if not pairs:
        return {}
    differing = [key for key, (one, other) in pairs.items() if one != other]
    if not differing:
        return {"random numbers": None}
    found = difference_of(step, "random numbers", differing, pairs, name=differing[0][0])
    return {"random numbers": found}


def compare_data(first: RecordedRun, second: RecordedRun, step: int) -> Outcome:
    """Compare the inputs of a step, bit by bit.

    If the runs divide their batches differently, into ranks or micro-batches, the batches are equal
    if they have the same rows in any order.
    """
    ours, theirs = first.fingerprints_of(step), second.fingerprints_of(step)
    rows, other_rows = [*_rows(ours)], [*_rows(theirs)]
    if not rows or not other_rows:
        return {}
    only_in = _only_in_first(rows, other_rows), _only_in_first(other_rows, rows)
    is_same_set = not any(only_in)
    if [place for place, _ in rows] != [place for place, _ in other_rows]:
        divided = Difference(step=step, kind="data", only_in=only_in)
        return {"data": None if is_same_set else divided}
    inputs, others = _inputs(ours), _inputs(theirs)
    differing = [key for key in inputs if inputs[key] != others.get(key)]
    if not differing:
        return {"data": None}
    pairs = zip(rows, other_rows, strict=True)
    found = difference_of(
        step,
        "data",
        [key[:2] for key in differing],
        [key[:2] for key in inputs],
        name=", ".join(dict.fromkeys(name for name, _, _ in differing)),
        rows=tuple(place for (place, one), (_, other) in pairs if one != other),
        num_rows=len(rows),
        is_other_order=is_same_set,
    )
    return {"data": found}


def _only_in_first(
    rows: Iterable[tuple[Row, str]], others: Iterable[tuple[Row, str]]
) -> tuple[Row, ...]:
    """Return the places of rows that are not, or less often, among the others."""
    left = Counter(row for _, row in others)
    found = []
    for place, row in rows:
        if left[row]:
            left[row] -= 1
        else:
            found.append(place)
    return tuple(found)


def _rows(steps: Mapping[int, StepFingerprints]) -> Iterator[tuple[Row, str]]:
    for rank, each in sorted(steps.items()):
        for number, micro_batch in enumerate(each.micro_batches):
            for row, hash_ in enumerate(micro_batch.rows):
                yield Row(rank, number, row), hash_


def _inputs(steps: Mapping[int, StepFingerprints]) -> dict[tuple[str, int, int], str]:
    """Return hash and shape of each input, by name, rank and micro-batch."""
    return {
        (name, rank, number): text
        for rank, each in sorted(steps.items())
        for number, micro_batch in enumerate(each.micro_batches)
        for name, text in micro_batch.inputs.items()
    }
