"""One command of torchrun, whose workers are killed again and again, ends like an unkilled run."""

import random

import pytest
import yaml

from support.crash.contents import contents, differences
from support.crash.recipe import RECIPE, write_rows
from support.crash.restarts import NUM_RANKS, Moments, launch_and_kill

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]

NUM_STEPS, SAVE_STEPS = 160, 4
NUM_KILLS = 20


def write_recipe(folder):
    """Write a longer form of the recipe of the other crash tests into a new folder."""
    folder.mkdir()
    training = RECIPE["training"] | {"max_steps": NUM_STEPS, "eval_steps": 20}
    *callbacks, monitor = RECIPE["callbacks"]
    saving = monitor | {"save_checkpoint_steps": SAVE_STEPS, "keep_checkpoint_max": 2}
    recipe = RECIPE | {"training": training, "callbacks": [*callbacks, saving]}
    (folder / "crash.yaml").write_text(yaml.safe_dump(recipe), encoding="utf-8")


def record_bytes(run):
    """Return the growth of the records between two checkpoints."""
    return sum(path.stat().st_size for path in run.glob("*.jsonl")) * SAVE_STEPS / NUM_STEPS


def test_mfwrap_train(tmp_path):
    """``mfwrap train --resume=auto`` starts, resumes and finishes by one command."""
    program = ["-m", "mfwrap", "train", "crash.yaml", "--resume=auto"]
    write_rows(tmp_path)
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    write_recipe(alone)
    assert launch_and_kill(alone, program) == (0, 0), (alone / "output.txt").read_text()[-4000:]

    write_recipe(killed)
    draw = random.Random(0)  # noqa: S311  (test data, not cryptography)
    moments = Moments(killed / "run", draw, 6.0, record_bytes(alone / "run"))
    kinds = [moments.starting, *[moments.any] * (NUM_KILLS - 2), moments.ending]
    kills = [(draw.randrange(NUM_RANKS), make) for make in kinds]
    ended = launch_and_kill(killed, program, kills)

    assert ended == (0, NUM_KILLS), (killed / "output.txt").read_text()[-4000:]
    assert differences(contents(alone / "run"), contents(killed / "run")) == []
    # A run that has finished says so.
    assert launch_and_kill(killed, program) == (0, 0)
    assert "this run has finished before" in (killed / "output.txt").read_text()
