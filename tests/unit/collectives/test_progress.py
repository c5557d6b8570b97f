"""A rank counts its updates and collectives; from two counts, a deadlock is recognized."""

import dataclasses
import inspect
import weakref

import pytest
from torch import distributed
from torch.nn.parallel import DistributedDataParallel

from mfwrap.collectives.progress import COLLECTIVES, Progress, RankStatus, collective_of_main_thread
from support.ranks.watches import collectives_of_updates

# Three updates of two collectives each; a rank is in the fourth, or has left the loop before it.
UPDATES = [[0, 1, 1], [1, 1, 3], [2, 3, 5], [3, 5, 7]]
IN_UPDATE = RankStatus(begun=4, done=3, collectives=8, of_updates=[*UPDATES, [4, 7, 8]], place="a")
IN_BARRIER = RankStatus(
    begun=3, done=3, collectives=8, of_updates=UPDATES, place="b", collective="barrier"
)


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


@pytest.mark.parametrize(
    ("own", "other"),
    [
        ({}, {}),
        # The update has not come to its collectives yet, or takes place in another group.
        ({"collectives": 7, "of_updates": [*UPDATES, [4, 7, 7]]}, {}),
        # The device is some updates behind: this rank has begun later updates.
        (
            {
                "begun": 6,
                "done": 5,
                "collectives": 12,
                "of_updates": [*UPDATES, [4, 7, 9], [5, 9, 11], [6, 11, 12]],
            },
            {},
        ),
        # The other rank has started a part of the update, has failed and meets the others.
        ({}, {"begun": 4, "end": "has raised ValueError", "collectives": 9}),
        # Both are after update 3, in different functions.
        (
            {"begun": 3, "of_updates": UPDATES, "collective": "all_gather"},
            {},
        ),
        (
            {
                "begun": 3,
                "of_updates": UPDATES,
                "collectives": 9,
                "collective": "_distributed_broadcast_coalesced",
            },
            {},
        ),
    ],
)
def test_a_deadlock(own, other):
    """A rank that waits in a collective while another rank waits for it in an update never ends."""
    waiting = dataclasses.replace(IN_UPDATE, **own)

    assert waiting.is_deadlocked_with(dataclasses.replace(IN_BARRIER, **other))


@pytest.mark.parametrize(
    ("own", "other"),
    [
        # The other rank evaluates, reads data, or is stopped by a debugger.
        ({}, {"collective": ""}),
        ({}, {"begun": 4, "of_updates": [*UPDATES, [4, 7, 8]]}),
        # The other rank still receives what this rank has sent before its update.
        ({}, {"collectives": 7}),
        # It has done all updates of this rank, or is in another training.
        ({}, {"begun": 4, "done": 4, "of_updates": [*UPDATES, [4, 7, 9]]}),
        ({}, {"training": 1}),
        # The counts are not comparable, or unknown.
        ({}, {"of_updates": [*UPDATES[:3], [3, 5, 8]]}),
        ({}, {"of_updates": []}),
        ({"of_updates": []}, {}),
        # This rank has started the collective after the update that the other rank lacks.
        (
            {
                "begun": 5,
                "done": 4,
                "collectives": 9,
                "of_updates": [*UPDATES, [4, 7, 7], [5, 8, 9]],
            },
            {},
        ),
        # Both wait for a third rank in the same function, or this rank waits in none.
        ({"begun": 3, "of_updates": UPDATES, "collective": "barrier"}, {}),
        ({"begun": 3, "of_updates": UPDATES}, {}),
        ({"begun": 3, "of_updates": UPDATES, "collective": "all_gather", "collectives": 9}, {}),
    ],
)
def test_no_deadlock(own, other):
    """A slow rank, and ranks whose counts prove nothing, are left alone."""
    waiting = dataclasses.replace(IN_UPDATE, **own)

    assert not waiting.is_deadlocked_with(dataclasses.replace(IN_BARRIER, **other))


def test_an_error_that_begins_with_an_empty_line():
    """The other ranks read the first line that says something."""
    progress = Progress(None)
    progress.begin_update()
    progress.fail(ValueError("\n    [Stage 0] failed to run forward:\n    args: 1"))

    assert progress.status().end == (
        "has raised ValueError in update 1: [Stage 0] failed to run forward:"
    )


def test_an_error_is_forgotten_when_the_ranks_meet_again():
    """A rank that has raised and goes on is no longer described as failed."""
    progress = Progress(None)
    progress.begin_update()
    progress.fail(ValueError("the batch is damaged"))
    failed = progress.status()

    progress.go_on()

    assert failed.has_failed
    assert progress.status() == RankStatus()


def test_functions_of_torch():
    """The functions that are recognized exist in torch, with the parameters that are compared."""
    for name, parameter in COLLECTIVES.items():
        parameters = inspect.signature(getattr(distributed, name)).parameters
        assert "group" in parameters
        assert parameter is None or parameter in parameters
    assert callable(DistributedDataParallel._distributed_broadcast_coalesced)


def test_a_group_without_numbers():
    """A backend that does not number its collectives makes no rank wait in vain."""
    progress = Progress(None)
    progress.begin_update()
    progress.end_update()

    assert progress.answer("here").of_updates == [[0, 0, 0], [1, 0, 0]]
    assert collective_of_main_thread(None) == ""


def test_a_destroyed_group_is_freed(tmp_path):
    """The count of a rank keeps no process group alive, whose threads would outlive Python."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1
    )
    try:
        group = weakref.ref(distributed.group.WORLD)
        progress = Progress(group())
        progress.begin_update()
        distributed.barrier()
        before = progress.answer("here").collectives
    finally:
        distributed.destroy_process_group()

    assert before > 0
    assert group() is None
    assert progress.answer("here").collectives == 0


def test_collectives_of_updates(two_ranks):
    """The collectives of each update are counted, and a waiting main thread is seen."""
    for of_updates, during, waits_in in two_ranks.run(collectives_of_updates):
        start = of_updates[0][1]
        assert [[n, first - start, last - start] for n, first, last in of_updates] == [
            [0, 0, 0],
            [1, 0, 2],
            [2, 3, 3],
        ]
        assert during == "all_reduce"
        assert waits_in == [[0, 1], []]
