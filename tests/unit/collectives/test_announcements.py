"""Ranks compare what they do without a collective."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import distributed

from mfwrap.collectives import Announcements, all_ranks_meet, rank_announcements
from mfwrap.collectives.announcements import _meet
from support.stores import FakeStoreOfTorch214


@pytest.fixture
def ranks():
    """Return the announcements of two ranks, which do not wait for each other."""
    store = distributed.HashStore()
    return [Announcements(store, rank, 2, seconds_to_follow=0.0) for rank in range(2)]


def test_ranks_that_do_the_same(ranks):
    """Ranks agree once all of them have announced the same."""
    first, second = ranks
    first.announce("a", "training a")
    assert not first.all_agree("a")
    assert first.who_differs("a") is None
    second.announce("a", "training a")

    assert first.all_agree("a")
    assert second.all_agree("a")


def test_ranks_that_do_something_else(ranks):
    """Each rank finds the announcement of the other, with its text."""
    first, second = ranks
    first.announce("a", "training a")
    second.announce("b", "training b")

    assert second.who_differs("b") == (0, "training a")
    assert first.who_differs("a") == (1, "training b")


def test_ranks_that_did_the_same_before(ranks):
    """A rank may do something by itself after or before it has done the same as the others."""
    first, second = ranks
    for rank in ranks:
        rank.announce("a", "training a")
    first.announce("b", "probing b")

    assert not first.all_agree("b")
    assert first.who_differs("b") is None
    assert second.who_differs("a") is None


def test_ranks_that_differ_later(ranks):
    """Ranks that have done the same before are compared again when they do something else."""
    first, second = ranks
    for rank in ranks:
        rank.announce("a", "training a")
    first.announce("b", "training b")
    second.announce("c", "training c")

    assert second.who_differs("c") == (0, "training b")
    assert first.who_differs("b") == (1, "training c")


def test_one_object_for_each_process_group():
    """A new process group starts without announcements."""
    found = []
    for _ in range(2):
        distributed.init_process_group("fake", rank=0, world_size=2, store=distributed.HashStore())
        found.append(rank_announcements())
        assert rank_announcements() is found[-1]
        distributed.destroy_process_group()

    assert found[0] is not found[1]


def test_ranks_that_meet():
    """Each meeting has one answer, which is true only if all ranks are there."""
    store = distributed.HashStore()
    with ThreadPoolExecutor(3) as pool:

        def meet(ranks, topic="a", seconds=60.0):
            calls = [pool.submit(_meet, store, topic, seconds, rank, 3) for rank in ranks]
            return [call.result() for call in calls]

        assert meet([0, 1, 2]) == [True] * 3
        assert meet([1], seconds=0.0) == [False]
        assert meet([2, 0], seconds=0.0) == [False] * 2
        assert meet([2, 1, 0]) == [True] * 3
        assert meet([2], topic="b", seconds=0.0) == [False]


def test_a_rank_that_comes_too_late():
    """It does not take the arrival of a rank that has left for its presence."""
    store = distributed.HashStore()
    assert not _meet(store, "a", 0.0, 0, 2)
    assert not _meet(store, "a", 0.0, 1, 2)


def test_a_store_that_keeps_nothing():
    """No rank meets the others through it."""
    distributed.init_process_group("fake", store=FakeStoreOfTorch214(), rank=0, world_size=2)
    try:
        assert not all_ranks_meet("a")
    finally:
        distributed.destroy_process_group()


def test_one_process_is_all_ranks():
    """Without other ranks nothing is sent."""
    assert all_ranks_meet("a")
