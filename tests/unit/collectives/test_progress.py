"""A rank counts its updates, and says in one clause what it does."""

import pytest

from mfwrap.collectives.progress import Progress, RankStatus


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


def test_an_error_that_begins_with_an_empty_line():
    """The other ranks read the first line that says something."""
    progress = Progress()
    progress.begin_update()
    progress.fail(ValueError("\n    [Stage 0] failed to run forward:\n    args: 1"))

    assert progress.status.end == (
        "has raised ValueError in update 1: [Stage 0] failed to run forward:"
    )


def test_an_error_is_forgotten_when_the_ranks_meet_again():
    """A rank that has raised and goes on is no longer described as failed."""
    progress = Progress()
    progress.begin_update()
    progress.fail(ValueError("the batch is damaged"))
    failed = progress.status

    progress.go_on()

    assert failed.has_failed
    assert progress.status == RankStatus()


def test_updates_are_counted():
    """A rank waits for others within an update only, and a new training begins at 0."""
    progress = Progress()
    for _ in range(2):
        progress.begin_training()
        progress.begin_update()
        progress.begin_update()  # of a further micro-batch
        waits_in = progress.waits_in()
        progress.end_update()
        progress.begin_update()
        progress.end_update()

    assert waits_in == (2, 1)
    assert progress.waits_in() is None
    progress.leave("has ended its program")
    assert progress.status == RankStatus(
        training=2, begun=2, done=2, end="has ended its program after update 2"
    )
