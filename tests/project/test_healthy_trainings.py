"""Count false alarms in healthy trainings of 65 kinds, whose health no monitor decides."""

import json
import logging
import math
from collections import Counter
from pathlib import Path

import pytest

from mfwrap.records.json_lines import read_json_lines
from support.healthy.campaign import Case, cases, episodes_in, notes_in, run_case
from support.healthy.kinds import KINDS, health, train
from support.healthy.split import (
    DEVELOPMENT,
    JUMPING,
    MOST_READINGS,
    UNSEEN,
    begin_reading,
    end_reading,
    readings,
)
from support.healthy.training import dice

pytestmark = [
    # peft uses `is_gradient_checkpointing`, which transformers has deprecated.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]

MOST_EPISODES, MOST_JUMPS = 2, 16
"""Largest number of episodes in one run of 400 steps of each kind of the development half: of those
that stay as they are, and of those that jump."""


@pytest.mark.parametrize("name", KINDS)
def test_each_kind_trains_under_the_monitor(name: str, tmp_path: Path):
    """Losses are finite, and each part of the training has a record for each of its steps."""
    losses = train(name, 0, tmp_path, 6)

    assert all(map(math.isfinite, losses))
    written = [read_json_lines(path) for path in tmp_path.rglob("training_state.jsonl")]
    assert sum(map(len, written)) == len(losses)


def test_the_same_seed_trains_alike():
    """Weights, data and drawn actions follow from the seed."""
    losses = [health("sparse rewards", seed, 20).losses for seed in (1, 1, 2)]

    assert losses[0] == losses[1] != losses[2]
    assert dice(1, 2).initial_seed() != dice(2, 1).initial_seed()


def test_the_monitor_changes_nothing(tmp_path: Path):
    """A run under the monitor has the losses of the run that shows its health."""
    assert train("solved margins", 0, tmp_path, 20) == health("solved margins", 0, 20).losses


def test_the_halves_are_balanced():
    """Each half has a like share of the ways, and at least one of each file of kinds."""
    assert (len(DEVELOPMENT), len(UNSEEN)) == (28, 37)
    assert {*DEVELOPMENT, *UNSEEN} == KINDS.keys()
    for feature in (lambda kind: kind.way, lambda kind: kind.make.__module__):
        all_kinds = Counter(feature(kind) for kind in KINDS.values())
        developed = Counter(feature(KINDS[name]) for name in DEVELOPMENT)
        for value, number in all_kinds.items():
            assert number / 7 <= developed[value] <= number / 2, value


def test_the_unseen_half_is_refused(tmp_path: Path):
    """A kind of the unseen half runs under the monitor only if it is asked for."""
    with pytest.raises(PermissionError, match="unseen half"):
        run_case(Case(kind=UNSEEN[0], seed=0, num_steps=6), tmp_path)

    assert not list(tmp_path.iterdir())


def test_readings_of_the_unseen_half_are_counted(tmp_path: Path):
    """Each reading is noted with date, commit and seed, and there are at most three."""
    path = tmp_path / "readings.jsonl"
    path.touch()
    for seed in range(MOST_READINGS):
        begin_reading(seed, 400, path)
    end_reading(420, 3, path)

    with pytest.raises(PermissionError, match="may be read 3 times"):
        begin_reading(3, 400, path)

    found = readings(path)
    assert [(one["seed"], one["steps"], one["episodes"]) for one in found] == [
        (0, 400, None),
        (1, 400, None),
        (2, 420, 3),
    ]
    assert len(readings()) <= MOST_READINGS
    assert all(one.keys() == found[0].keys() for one in readings())


def test_steps_are_shared_out():
    """Each kind has equally many runs with seeds of their own, and one at least."""
    chosen = cases(("one", "other"), 2_000, 5, 400)

    assert Counter(one.kind for one in chosen) == {"one": 2, "other": 2}
    assert {one.seed for one in chosen} == {5, 6}
    assert len(cases(("one", "other"), 1, 0, 400)) == 2


def test_records_that_begin_an_episode_count(tmp_path: Path):
    """The record of an episode's end is none of its own; all parts count, and notes are apart."""
    for part, step in (("part0", 7), ("part1", 3)):
        folder = tmp_path / part
        folder.mkdir()
        rows = [{"step": step, "kind": "spike"}, {"step": step, "kind": "spike", "last_step": 9}]
        rows.append({"step": step + 1, "kind": "note"})
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / "anomalies.jsonl").write_text(text, encoding="utf-8")

    assert [one["step"] for one in episodes_in(tmp_path)] == [3, 7]
    assert [one["step"] for one in notes_in(tmp_path)] == [4, 8]


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_healthy(name: str):
    """Without a monitor, losses stay finite and the error of the task falls below its goal."""
    found = health(name, 0)

    assert all(map(math.isfinite, found.losses))
    assert found.last <= KINDS[name].goal * found.first, found.last / found.first


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_false_alarms_of_the_development_half(tmp_path: Path):
    """One run of each kind has no more episodes than is allowed."""
    outcomes = [
        run_case(Case(kind=name, seed=0), tmp_path / str(place))
        for place, name in enumerate(DEVELOPMENT)
    ]

    episodes = [(one.kind, each) for one in outcomes for each in one.episodes]
    for kind, each in episodes:
        logging.getLogger(__name__).info("%s: %s", kind, each)
    jumps = [kind for kind, _ in episodes if kind in JUMPING]
    assert len(episodes) - len(jumps) <= MOST_EPISODES
    assert len(jumps) <= MOST_JUMPS
