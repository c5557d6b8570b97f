"""Records of anomalies become episodes."""

import pytest

from mfwrap.records.episodes import episodes_of, notes_of

NEW = {"kind": "loss_spike", "cause": "data"}


def spans(episodes):
    """Return kind, steps and counts of episodes."""
    return [(one.kind, one.step, one.last_step, one.num_steps, one.num_skipped) for one in episodes]


def test_the_end_completes_the_beginning():
    """The record at the end of an episode adds its last step, its counts, and a later cause."""
    records = [
        {"step": 20, "kind": "spike", "cause": "unknown", "skipped": True},
        {"step": 30, **NEW, "skipped": False},
        {
            "step": 20,
            "kind": "spike",
            "last_step": 25,
            "num_steps": 4,
            "num_skipped": 3,
            "cause": "data",
        },
    ]
    episodes = episodes_of([(0, records)])

    assert spans(episodes) == [("spike", 20, 25, 4, 3), ("loss_spike", 30, 30, 1, 0)]
    assert episodes[0].cause == "data"
    assert episodes[0].records[0]["skipped"] is True


def test_an_end_alone_is_an_episode():
    """An end whose beginning is lost still says when the episode was."""
    end = {"step": 20, "kind": "spike", "last_step": 25, "num_steps": 4, "num_skipped": 3}

    assert spans(episodes_of([(0, [end])])) == [("spike", 20, 25, 4, 3)]


@pytest.mark.parametrize(
    ("other", "number"), [({}, 1), ({"cause": "rank_data"}, 2), ({"step": 9}, 2)]
)
def test_ranks_with_the_same_episode_are_joined(other, number):
    """Step, kind and cause must agree; the longest episode counts."""
    end = {"last_step": 10, "num_steps": 3, "num_skipped": 0}
    ranks = [
        (0, [{"step": 8, **NEW, "ranks": [0]}]),
        (3, [{"step": 8, **NEW, **other}, {"step": 8, **NEW, **other, **end}]),
    ]
    episodes = episodes_of(ranks)

    assert len(episodes) == number
    assert [rank for one in episodes for record in one.records for rank in record["ranks"]] == [
        0,
        3,
    ]
    assert episodes[-1].last_step == 10


def test_records_without_a_step_are_left_out():
    """What is not the record of a step is no episode."""
    assert episodes_of([(0, [{}, {"step": "x"}, {"step": True}])]) == []


def test_notes_are_no_episodes():
    """What several ranks note in a step is one note of these ranks."""
    note = {"step": 7, "kind": "note", "explanation": "`lr` is odd"}
    other = {**note, "step": 3}
    files = [
        (0, [{**note, "ranks": [0]}, {"step": 5, **NEW}]),
        (2, [{**note, "ranks": [2]}, other]),
    ]

    assert spans(episodes_of(files)) == [("loss_spike", 5, 5, 1, 0)]
    assert [(one["step"], one["ranks"]) for one in notes_of(files)] == [(3, []), (7, [0, 2])]
