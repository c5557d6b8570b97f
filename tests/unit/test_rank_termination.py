"""One last step for all ranks, whichever of them is told to end and when."""

import os
import signal
import tempfile
import threading
from datetime import timedelta

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import distributed

from mfwrap import termination as rank_termination
from mfwrap.termination import LastStep, RankTermination

CPU = torch.device("cpu")
NUM_RANKS = 3
NUM_STEPS = 4
PATIENCE = 60.0
"""Seconds after which ranks that wait for each other are given up."""


@pytest.fixture(autouse=True)
def _looks_often(monkeypatch):
    monkeypatch.setattr(rank_termination, "_SECONDS_BETWEEN_LOOKS", 0.001)


def stores(kind):
    """Return one key-value store as each rank holds it."""
    limit = timedelta(seconds=PATIENCE)
    if kind == "TCP":
        first = distributed.TCPStore("localhost", 0, is_master=True, timeout=limit)
        return [first, *(first.clone() for _ in range(NUM_RANKS - 1))]
    if kind == "file":
        path = tempfile.mkdtemp() + "/store"
        return [distributed.FileStore(path, NUM_RANKS) for _ in range(NUM_RANKS)]
    store = distributed.HashStore()
    store.set_timeout(limit)
    return [store] * NUM_RANKS


def train(store, rank, told_in, reduced, result):
    """Do steps as DistributedDataParallel does: none is done before all have begun it."""
    last = LastStep(store, "", rank, NUM_RANKS)
    is_told = False
    stopped = None
    for step in range(1, NUM_STEPS + 1):
        is_told |= told_in == (step, "before")
        reduced.wait(PATIENCE)
        is_told |= told_in == (step, "after")
        if last.is_reached(step, is_requested=is_told):
            stopped = step
            break
    last.close()
    result[rank] = (step, stopped)


def outcome(told, kind="hash"):
    """Return for each rank how many steps it did, and after which one it was told to stop."""
    # The first one's process outlives the training.
    shared, reduced, result = stores(kind), threading.Barrier(NUM_RANKS), {}
    threads = [
        threading.Thread(target=train, args=(store, rank, told.get(rank), reduced, result))
        for rank, store in enumerate(shared)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(result) == list(range(NUM_RANKS)), "ranks wait for each other for ever"
    return list(result.values())


MOMENTS = st.tuples(st.integers(1, NUM_STEPS), st.sampled_from(["before", "after"]))


@given(told=st.dictionaries(st.integers(0, NUM_RANKS - 1), MOMENTS))
@settings(max_examples=60)
@example(told={0: (1, "before")})
@example(told={2: (NUM_STEPS, "after")})
@example(told=dict.fromkeys(range(NUM_RANKS), (2, "before")))
def test_all_ranks_stop_after_the_same_step(told):
    """It is the one in which the first rank was told, or the next one; nobody waits for ever."""
    results = outcome(told)

    assert len(set(results)) == 1
    done, stopped = results[0]
    first = min((step for step, _ in told.values()), default=NUM_STEPS + 1)
    assert done in {min(first, NUM_STEPS), min(first + 1, NUM_STEPS)}
    assert stopped in {None, done}
    if done < NUM_STEPS:
        assert stopped == done


@pytest.mark.parametrize("kind", ["TCP", "file"])
@pytest.mark.parametrize("told", [{}, {0: (2, "before")}, {2: (2, "after")}])
def test_stores(kind, told):
    """So it is with each kind of store that torch starts ranks with."""
    results = outcome(told, kind)

    assert len(set(results)) == 1
    assert results[0][0] in ({2, 3} if told else {NUM_STEPS})


def test_a_rank_that_has_ended_answers():
    """One that was told in the very end does not wait for one that listens no more."""
    first, last = (
        LastStep(store := distributed.HashStore(), "a/", 0, 2),
        LastStep(store, "a/", 1, 2),
    )
    assert not last.is_reached(7, is_requested=False)
    last.close()

    assert not first.is_reached(7, is_requested=True)
    assert first.is_reached(8, is_requested=True)
    first.close()


LOST = distributed.DistNetworkError("connection reset")


class LostStore:
    """A store whose process is gone."""

    def check(self, _keys):
        """Fail."""
        raise LOST

    def set(self, _key, _value):
        """Fail."""
        raise LOST


def listened_in_vain():
    """Return what has given up listening."""
    last = LastStep(LostStore(), "", 0, 2)
    last._thread.join(PATIENCE)
    return last


def test_a_store_that_is_lost():
    """It is said that nobody listens any more; the training does not end for it."""
    with pytest.warns(UserWarning, match="SIGTERM at another rank .*: connection reset"):
        last = listened_in_vain()

    assert not last.is_reached(1, is_requested=False)
    last.close()


def tell_to_end():
    """Send this process a SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)


def test_one_process():
    """The step in which it is told is the last one; no other process has to know."""
    with RankTermination() as termination:
        assert not termination.stops_after(1)
        assert not termination.is_stopping
        tell_to_end()
        assert termination.stops_after(2)
        assert termination.is_stopping
        assert termination.conclude(CPU)


def test_one_process_that_was_not_told():
    """Neither in this block, though in an earlier one."""
    termination = RankTermination()
    with termination:
        tell_to_end()
        assert termination.stops_after(1)
    with termination:
        assert not termination.is_stopping
        assert not termination.stops_after(1)
        assert not termination.conclude(CPU)


def test_told_after_the_last_step():
    """The training ends as it would have, and it is known why."""
    with RankTermination() as termination:
        assert not termination.stops_after(1)
        tell_to_end()
        assert not termination.is_stopping
        assert termination.conclude(CPU)


@pytest.mark.parametrize("concludes", [True, False])
def test_what_was_there_before(concludes):
    """Signals go where they went before it, once the block has ended or is concluded."""
    before = signal.getsignal(signal.SIGTERM)
    with RankTermination() as termination:
        assert signal.getsignal(signal.SIGTERM) != before
        if concludes:
            termination.conclude(CPU)
            assert signal.getsignal(signal.SIGTERM) == before

    assert signal.getsignal(signal.SIGTERM) == before
