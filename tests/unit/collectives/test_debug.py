"""Ranks that start different collectives get an error with the call sites of all ranks."""

import os
import subprocess
import sys

import pytest

from mfwrap.collectives import debug
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


def test_a_wrong_value_of_the_variable(monkeypatch):
    """A value other than 0 and 1 is refused."""
    monkeypatch.setenv(debug.VARIABLE, "yes")

    with pytest.raises(ValueError, match="MFWRAP_DEBUG_COLLECTIVES must be 0 or 1, got 'yes'"):
        debug.compare_if_asked()


@pytest.mark.slow
@pytest.mark.parametrize(("value", "is_compared"), [("", False), ("0", False), ("1", True)])
def test_torch_is_left_alone_unless_asked(value, is_compared):
    """Without the variable, torch's functions are torch's own: the mode then costs nothing."""
    program = (
        "import mfwrap.collectives\n"
        "from torch import distributed\n"
        "print(distributed.all_reduce.__code__.co_filename.endswith('debug.py'))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONSAFEPATH": "1", debug.VARIABLE: value},
        capture_output=True,
        text=True,
        check=True,
    )

    assert result.stdout.strip() == str(is_compared)
