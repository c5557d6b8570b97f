"""The sections of the training set the Trainer's arguments."""

import math
from pathlib import Path

import pytest

from support.recipe_texts import message, parsed, recipe_text


@pytest.mark.parametrize(
    ("wrapper", "training", "limit"),
    [
        (None, {}, 1.0),
        (None, {"max_grad_norm": 0.3}, 0.3),
        ({}, {}, 0.0),
        ({}, {"max_grad_norm": 0.3}, 0.3),
        ({"use_clip_grad": True}, {}, 1.0),
        ({"use_clip_grad": True}, {"max_grad_norm": 0.3}, 0.3),
        ({"use_clip_grad": True, "max_grad_norm": 2.0}, {}, 2.0),
        ({"use_clip_grad": True, "max_grad_norm": math.inf}, {}, math.inf),
        ({"use_clip_grad": False, "max_grad_norm": 2.0}, {}, 0.0),
    ],
)
def test_clipping(wrapper, training, limit):
    """Clipping is on by default, but off by default with a section ``runner_wrapper``."""
    sections = {} if wrapper is None else {"runner_wrapper": wrapper}

    assert parsed(training=training, **sections).arguments.max_grad_norm == limit


def test_two_learning_rates():
    """Two sections that set different rates are an error."""
    section = {"type": "LinearWithWarmUpLR", "learning_rate": 1, "warmup_steps": 1}

    assert "training.learning_rate: expected 1 as in lr_schedule, or no value" in message(
        text=recipe_text(lr_schedule=section)
    )


def test_two_learning_rates_are_named_where_they_stand():
    """The error for a rate that contradicts the schedule names the line of that rate."""
    text = recipe_text(
        lr_schedule={"type": "LinearWithWarmUpLR", "learning_rate": 1, "warmup_steps": 1},
        optimizer={"type": "AdamW", "learning_rate": 0.5},
        training=None,
    )
    number = len(text.splitlines()) - text.splitlines()[::-1].index("  learning_rate: 0.5")

    assert message(text=text) == (
        f"r.yaml:{number}: optimizer.learning_rate: expected 1 as in lr_schedule, or no value, "
        "got 0.5"
    )
    assert message("training.learning_rate=0.5", text=text) == (
        "--set training.learning_rate: expected 1 as in lr_schedule, or no value, got 0.5"
    )


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs Linux's /proc")
def test_an_output_folder_that_cannot_be_made():
    """A folder that is missing is made by the training; here, nothing can be made in its parent."""
    assert message("training.output_dir=/proc/run") == (
        "--set training.output_dir: expected a writable folder, or a path where one can be made, "
        "got '/proc/run': cannot write to the folder /proc: No such file or directory; choose a "
        "writable folder"
    )


@pytest.mark.parametrize("saves", ["steps", "best"])
def test_the_best_model_needs_evaluations(saves):
    """Without evaluations, the error names the key to set."""
    settings = {"load_best_model_at_end": True, "save_strategy": saves}

    assert message(text=recipe_text(training=settings)).endswith(
        ": training.load_best_model_at_end: needs evaluations; set training.eval_strategy to steps "
        "or epoch, as save_strategy"
    )
