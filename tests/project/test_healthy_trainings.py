"""Train healthy networks of 45 kinds, whose health no monitor decides."""

import math
from pathlib import Path

import pytest

from mfwrap.records.json_lines import read_json_lines
from support.healthy.kinds import KINDS, health, train
from support.healthy.training import dice

pytestmark = [
    # peft uses `is_gradient_checkpointing`, which transformers has deprecated.
    pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning"),
]


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


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
def test_each_kind_is_healthy(name: str):
    """Without a monitor, losses stay finite and the error of the task falls below its goal."""
    found = health(name, 0)

    assert all(map(math.isfinite, found.losses))
    assert found.last <= KINDS[name].goal * found.first, found.last / found.first
