"""Tests on ranks that start different collectives fail with the call sites of all ranks."""

import pytest

from support.ranks.divergence import DIVERGING, barriers_at_two_places, diverge, stay_away

SHOWN = {
    "a gather beside a barrier": ("all_gather_object at ", "barrier at "),
    "another shape": ("all_reduce of float32[2] at ", "all_reduce of float32[3] at "),
    "another dtype": ("all_reduce of float32[2] at ", "all_reduce of float64[2] at "),
    "another line": ("all_gather_object at ", "all_gather_object at "),
    "another function of torch": ("broadcast_object_list at ", "all_gather_object at "),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DIVERGING)
def test_ranks_that_disagree(two_ranks, name):
    """Both ranks raise the same error, which names both calls and their places; nobody waits."""
    first, second = two_ranks.run(diverge, name)

    assert first == second
    zero, one = first.partition("rank 0 starts ")[2].split("; rank 1 starts ")
    for shown, expected in zip((zero, one), SHOWN[name], strict=True):
        assert shown.startswith(f"{expected}ranks/divergence.py:")
    assert zero.split(" < ")[0] != one.split(" < ")[0]


@pytest.mark.slow
def test_one_barrier_at_two_places(two_ranks):
    """The same collective of another library may start at different lines."""
    assert two_ranks.run(barriers_at_two_places) == [0, 1]


@pytest.mark.slow
def test_a_rank_that_stays_away(two_ranks):
    """A rank that does not come is reported with its place, and may still come."""
    reports, _ = two_ranks.run(stay_away)

    assert "for rank 1: rank 1 is after update " in reports[0]
    assert "all_gather_object at ranks/divergence.py:" in reports[0]
    assert reports[0].count("ranks/divergence.py:") > 1
