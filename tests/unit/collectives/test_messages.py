"""Ranks exchange short messages through a store."""

import logging

from torch import distributed

from mfwrap.collectives.messages import RankMessages
from mfwrap.collectives.progress import RankStatus


def _two_ranks():
    store = distributed.HashStore()
    places = ["a.py:1 in f", "b.py:2 in g"]
    return [
        RankMessages(store, rank, 2, lambda place=place: RankStatus(place=place))
        for rank, place in enumerate(places)
    ]


def test_a_rank_that_has_ended_is_not_waited_for():
    """A question returns the last published status of a rank that has ended, at once."""
    first, second = _two_ranks()
    ended = RankStatus(done=3, begun=3, end="has ended its training after update 3")
    second.publish(ended)

    assert first.ask() == {1: ended}
    assert second.last_seen(0) == RankStatus()


def test_a_report_is_logged_by_all_ranks(caplog):
    """Each rank logs a report once."""
    first, second = _two_ranks()

    with caplog.at_level(logging.WARNING, "mfwrap"):
        first.tell("rank 1 is late")
        for messages in (first, second, second):
            messages.answer_all()
            messages.read_reports()

    assert caplog.messages == ["rank 1 is late"] * 2
