"""Evaluation intervals of a MindFormers file are converted, with a note where they change."""

import math

import pytest

from mfwrap.runner import RecipeError
from mfwrap.runner.mindformers.evaluation import evaluation
from support.mindformers_files import imported, imported_recipe

EVERY_EPOCH = {"eval_strategy": "epoch"}


def every(steps):
    """Return the evaluation keys for an interval in steps; below 1 it is a share of the run."""
    return {"eval_strategy": "steps", "eval_steps": steps}


@pytest.mark.parametrize(
    ("intervals", "training", "notes"),
    [
        ((50, -1), every(50), []),
        ((None, None), every(100), []),
        ((0, 0), every(100), []),
        ((-1, 1), EVERY_EPOCH, []),
        (
            (100, 1),
            every(100),
            ["eval_epoch_interval: left out, because eval_step_interval is set"],
        ),
        (
            (None, 1),
            EVERY_EPOCH,
            ["eval_step_interval: left out (default 100), because eval_epoch_interval is set"],
        ),
        (
            (-1, 50),
            every(0.5),
            ["eval_epoch_interval: becomes eval_steps, a share of the training (50 of 100 epochs)"],
        ),
        (
            (-1, 100),
            {},
            ["eval_epoch_interval: the training has 100 epochs; evaluates once, at the end"],
        ),
        ((-1, -1), {}, ["training: no evaluation interval is > 0; evaluates once, at the end"]),
    ],
)
def test_intervals(intervals, training, notes):
    """One interval is carried over; a note says which one is left out or replaced."""
    assert evaluation(*intervals, {"num_train_epochs": 100}) == (training, notes)


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


def test_evaluation_of_a_file():
    """A file that evaluates sets interval and batch size; one that does not sets neither."""
    changes = {"eval_step_interval": 50, "eval_dataset": {"batch_size": 2}}
    evaluated = imported_recipe(changes | {"do_eval": True}).arguments
    _, recipe = imported(changes | {"do_eval": False})

    assert (evaluated.eval_steps, evaluated.per_device_eval_batch_size) == (50, 2)
    assert not any("eval" in key for key in recipe["training"])


def test_an_interval_is_an_int():
    """An interval that is not an integer is an error that names the key."""
    with pytest.raises(RecipeError, match=r"eval_step_interval: expected an integer, got 'often'"):
        imported({"do_eval": True, "eval_step_interval": "often"})
