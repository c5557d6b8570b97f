"""Evaluation intervals of a MindFormers file are converted, with a note where they change."""

import math

import pytest
import yaml

from mfwrap.recipe import RecipeError, parse_recipe
from mfwrap.recipe.mindformers import evaluation, import_mindformers

EVERY_EPOCH = {"eval_strategy": "epoch"}


def every(steps):
    """Return the evaluation keys for an interval in steps; below 1 it is a share of the run."""
    return {"eval_strategy": "steps", "eval_steps": steps}


def imported(steps, epochs, length=None):
    """Import intervals and check the recipe; return the recipe's evaluation keys and the notes."""
    lines = ["do_eval: True"]
    lines += [] if steps is None else [f"eval_step_interval: {steps}"]
    lines += [] if epochs is None else [f"eval_epoch_interval: {epochs}"]
    lines += [] if length is None else [f"runner_config: {{epochs: {length}}}"]
    result = import_mindformers("\n".join(lines), "m.yaml")
    parse_recipe(result.text, "m.yaml", ["training.use_cpu=true"])
    training = yaml.safe_load(result.text).get("training", {})
    training.pop("num_train_epochs", None)
    return training, result.notes


@pytest.mark.parametrize(
    ("intervals", "training"),
    [
        ((50, -1), every(50)),
        ((None, None), every(100)),
        ((0, 0), every(100)),
        ((-1, 1), EVERY_EPOCH),
    ],
)
def test_one_interval_is_carried_over(intervals, training):
    """A single interval is converted without a note; the default is 100 steps."""
    assert imported(*intervals) == (training, [])


@pytest.mark.parametrize(
    ("intervals", "training", "note"),
    [
        ((100, 1), every(100), "eval_epoch_interval: left out, because eval_step_interval is set"),
        (
            (None, 1),
            EVERY_EPOCH,
            "eval_step_interval: left out (default 100), because eval_epoch_interval is set",
        ),
        ((-1, 50), EVERY_EPOCH, "eval_epoch_interval: evaluates every epoch, not every 50"),
        (
            (-1, 50, 100),
            every(0.5),
            "eval_epoch_interval: becomes eval_steps, a share of the training (50 of 100 epochs)",
        ),
        (
            (-1, 50, 50),
            {},
            "eval_epoch_interval: the training has 50 epochs; evaluates once, at the end",
        ),
        ((-1, -1), {}, "training: no evaluation interval is > 0; evaluates once, at the end"),
    ],
)
def test_a_changed_interval_is_noted(intervals, training, note):
    """A note says which interval is left out or replaced."""
    assert imported(*intervals) == (training, [note])


def test_a_share_of_the_run_ends_with_an_epoch():
    """After the Trainer's rounding, the interval is exactly a whole number of epochs."""
    for length in range(2, 60):
        for epochs in range(2, length):
            part = evaluation(-1, epochs, {"num_train_epochs": length})[0]["eval_steps"]
            for updates in (1, 3, 7, 1000, 12345):
                assert math.ceil(length * updates * part) == epochs * updates


def test_a_limit_of_steps_has_no_epochs():
    """With a limit of steps the number of epochs is unknown, so every epoch is evaluated."""
    keys, notes = evaluation(-1, 2, {"num_train_epochs": 4, "max_steps": 10})

    assert keys == EVERY_EPOCH
    assert notes == ["eval_epoch_interval: evaluates every epoch, not every 2"]


def test_without_evaluation_there_is_nothing():
    """Intervals of a run without evaluation are ignored without a note."""
    result = import_mindformers("do_eval: False\neval_epoch_interval: 50\n", "m.yaml")

    assert "training" not in yaml.safe_load(result.text)
    assert result.notes == []


@pytest.mark.parametrize("key", ["eval_step_interval", "eval_epoch_interval"])
def test_an_interval_is_an_int(key):
    """An interval that is not an integer is an error that names the key."""
    with pytest.raises(RecipeError, match=rf"m.yaml:2: {key}: expected an integer, got 'often'"):
        import_mindformers(f"do_eval: True\n{key}: often\n", "m.yaml")
