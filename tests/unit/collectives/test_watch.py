"""A rank that leaves a training, falls behind or dies is named by the other ranks."""

import pytest

from mfwrap.collectives.watch import rank_watch
from support.ranks.watches import fall_behind, leave_early


def test_one_rank_has_no_watch():
    """Without a process group there is nobody to wait for."""
    assert rank_watch() is None


@pytest.mark.slow
def test_a_rank_that_falls_behind(two_ranks):
    """Both ranks log which rank an update waits for, and where that rank is."""
    first, second = two_ranks.run(fall_behind)

    assert first == second
    assert " s in update 2 for rank 1: rank 1 is after update 1, at ranks/watches.py:" in first


@pytest.mark.slow
def test_a_rank_that_ends_its_training_early(two_ranks):
    """The rank with fewer updates raises; the other rank learns of its end."""
    first, second = two_ranks.run(leave_early)

    assert first == "rank 1 has ended its training after update 1"
    assert second == (
        "rank 1 has no batch for update 2, but rank 0 has begun update 2; give every rank the same "
        "number of batches"
    )
