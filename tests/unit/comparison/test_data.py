"""Batches are compared by their rows, however they are divided."""

from pathlib import Path

import pytest

from mfwrap.comparison.data import compare_data, compare_random
from mfwrap.comparison.differences import Row
from mfwrap.comparison.recorded_run import RecordedRun
from mfwrap.records.fingerprints import MicroBatch, RankFingerprints, StepFingerprints


def run(*ranks, state="s"):
    """Return a run whose ranks have these micro-batches, each a string of rows, at step 1."""
    found = {}
    for rank, batches in enumerate(ranks):
        micro_batches = tuple(MicroBatch({"x": batch}, tuple(batch)) for batch in batches)
        step = StepFingerprints({"host": state}, micro_batches, None, None, {})
        found[rank] = RankFingerprints({}, {}, {1: step}, {})
    return RecordedRun(Path("r"), len(ranks), {}, {}, {}, found)


@pytest.mark.parametrize(
    ("first", "second", "is_equal"),
    [
        ((["abcd"],), (["ab", "cd"],), True),
        ((["abcd"],), (["ac"], ["bd"]), True),
        ((["abcd"],), (["ac"], ["bx"]), False),
        ((["ab", "cd"],), (["ab", "cd"],), True),
    ],
)
def test_other_division(first, second, is_equal):
    """The same rows in other ranks or micro-batches make the same batch."""
    assert (compare_data(run(*first), run(*second), 1)["data"] is None) == is_equal


def test_rows():
    """The rows that differ are named by rank, micro-batch and row."""
    found = compare_data(run(["ab", "cd"], ["ef"]), run(["ab", "cx"], ["ef"]), 1)["data"]
    swapped = compare_data(run(["ab"]), run(["ba"]), 1)["data"]

    assert (found.rows, found.ranks) == ((Row(0, 1, 1),), (0,))
    assert swapped.is_other_order
    assert not found.is_other_order


def test_rows_of_one_run():
    """If a batch has other places, the rows are named that only one run has."""
    shorter = compare_data(run(["aabc"]), run(["ab", "d"]), 1)["data"]

    assert shorter.only_in == ((Row(0, 0, 1), Row(0, 0, 3)), (Row(0, 1, 0),))
    assert shorter.rows == ()
    assert compare_data(run(["ab"]), run(["cd"]), 1)["data"].num_rows == 2


def test_random_numbers():
    """Random numbers are compared if both runs have the same number of ranks."""
    assert compare_random(run(["a"]), run(["a"]), 1) == {"random numbers": None}
    assert compare_random(run(["a"]), run(["a"], state="t"), 1)["random numbers"].name == "host"
    assert compare_random(run(["a"]), run(["a"], ["b"]), 1) == {}
    assert compare_data(run([]), run([]), 1) == {}
