"""A rank that leaves a training, falls behind or dies is named by the other ranks."""

import pytest
from torch import distributed

from mfwrap.collectives.watch import RankStatus, has_keys, rank_watch
from support.ranks.watches import fall_behind, leave_early


@pytest.mark.parametrize(
    ("status", "words"),
    [
        (RankStatus(begun=6, done=5), "rank 1 does not answer and was last seen in update 6"),
        (RankStatus(begun=5, done=5), "rank 1 does not answer and was last seen after update 5"),
        (RankStatus(begun=6, done=5, place="a.py:3 in f"), "rank 1 is in update 6, at a.py:3 in f"),
        (RankStatus(end="has raised ValueError", place="x"), "rank 1 has raised ValueError"),
    ],
)
def test_a_status_in_words(status, words):
    """What a rank does is said in one clause."""
    assert status.description(1) == words


def test_keys_that_are_missing():
    """Waiting for a key ends when the key is there, or when the time is over."""
    store = distributed.HashStore()
    store.set("here", "")

    assert has_keys(store, ["here"], 10.0)
    assert not has_keys(store, ["here", "missing"], 0.0)


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
