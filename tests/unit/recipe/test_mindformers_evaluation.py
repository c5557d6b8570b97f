"""A MindFormers file's evaluation is carried over where the Trainer can say it, else noted."""

import math

import pytest
import yaml

from mfwrap.recipe import RecipeError, parse_recipe
from mfwrap.recipe.mindformers import evaluation, import_mindformers

EVERY_EPOCH = {"eval_strategy": "epoch"}


def every(steps):
    """Return the keys of an evaluation every so many steps, or at every such part of the run."""
    return {"eval_strategy": "steps", "eval_steps": steps}


def imported(steps, epochs, length=None):
    """Return what a file's intervals become, in a recipe that is valid, and the notes of it."""
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
    """Steps alone, the default of 100 included, or every epoch: there is nothing to say."""
    assert imported(*intervals) == (training, [])


@pytest.mark.parametrize(
    ("intervals", "training", "note"),
    [
        ((100, 1), every(100), "training: without eval_epoch_interval 1, beside that of steps"),
        ((None, 1), EVERY_EPOCH, "training: without eval_step_interval 100, a default"),
        ((-1, 50), EVERY_EPOCH, "training: evaluates after every epoch, not every 50 epochs"),
        (
            (-1, 50, 100),
            every(0.5),
            "training: 50 of 100 epochs are eval_steps, a part of the training",
        ),
        (
            (-1, 50, 50),
            {},
            "training: has no evaluation before epoch 50, so once, at its end",
        ),
        ((-1, -1), {}, "training: no interval of evaluation is > 0, so once, at its end"),
    ],
)
def test_what_an_interval_loses_is_said(intervals, training, note):
    """Of two intervals one stays; some epochs are a part of all, or else each one."""
    assert imported(*intervals) == (training, [note])


def test_some_epochs_end_with_their_last_step():
    """The Trainer rounds the part of its steps up: it is never one step too late."""
    for length in range(2, 60):
        for epochs in range(2, length):
            part = evaluation(-1, epochs, {"num_train_epochs": length})[0]["eval_steps"]
            for updates in (1, 3, 7, 1000, 12345):
                assert math.ceil(length * updates * part) == epochs * updates


def test_a_limit_of_steps_has_no_epochs():
    """A run that stops after some steps has no number of epochs that a part could be of."""
    keys, notes = evaluation(-1, 2, {"num_train_epochs": 4, "max_steps": 10})

    assert keys == EVERY_EPOCH
    assert notes == ["training: evaluates after every epoch, not every 2 epochs"]


def test_without_evaluation_there_is_nothing():
    """Intervals of a run that does not evaluate mean nothing, and nothing is said of them."""
    result = import_mindformers("do_eval: False\neval_epoch_interval: 50\n", "m.yaml")

    assert "training" not in yaml.safe_load(result.text)
    assert result.notes == []


@pytest.mark.parametrize("key", ["eval_step_interval", "eval_epoch_interval"])
def test_an_interval_is_an_int(key):
    """Another one is refused by name."""
    with pytest.raises(RecipeError, match=f"line 2: `{key}` must be an int, got 'often'"):
        import_mindformers(f"do_eval: True\n{key}: often\n", "m.yaml")
