"""The sections of the training set the Trainer's arguments and the schedule."""

import math
from pathlib import Path

import pytest
import torch

from mfwrap.recipe import RecipeError, parse_recipe
from mfwrap.schedules import SCHEDULES
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


def test_optimizer_section():
    """MindFormers' section ``optimizer`` sets the Trainer's arguments."""
    optimizer = {"type": "AdamW", "betas": [0.8, 0.95], "eps": 1e-7, "weight_decay": 0.1}
    arguments = parsed(optimizer=optimizer).arguments

    assert (arguments.adam_beta1, arguments.adam_beta2) == (0.8, 0.95)
    assert (arguments.adam_epsilon, arguments.weight_decay) == (1e-7, 0.1)
    assert str(arguments.optim.value) == "adamw_torch_fused"


def test_lr_schedule_section():
    """MindFormers' schedule spans the training and sets the learning rate."""
    section = {"type": "CosineWithWarmUpLR", "learning_rate": 1.0, "lr_end": 0.1, "warmup_steps": 2}
    recipe = parsed(
        lr_schedule=section | {"total_steps": -1}, training={"learning_rate": 1.0, "max_steps": 10}
    )
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=recipe.arguments.learning_rate)
    schedule = recipe.schedule.make(optimizer, 10)

    # The expected rates were recorded from MindFormers.
    rates = [schedule.rate(1.0, step) for step in (0, 1, 2, 6, 9, 10)]
    assert rates == pytest.approx([0, 0.5, 1, 0.55, 0.134254, 0.1], abs=1e-6)


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


ALIASES = {
    "constant_with_warmup": "ConstantWarmUpLR",
    "cosine": "CosineWithWarmUpLR",
    "cosine_annealing": "CosineAnnealingLR",
    "cosine_annealing_warm_restarts": "CosineAnnealingWarmRestarts",
    "cosine_with_restarts": "CosineWithRestartsAndWarmUpLR",
    "linear": "LinearWithWarmUpLR",
    "polynomial": "PolynomialWithWarmUpLR",
}
"""Class of each name that MindFormers registers in ``core/lr/build_lr.py``."""

ARGUMENTS = {
    "cosine_annealing": {"base_lr": 0.01, "t_max": 4},
    "cosine_annealing_warm_restarts": {"base_lr": 0.01, "t_0": 4},
}
WARM_UP = {"learning_rate": 0.01, "warmup_steps": 1, "total_steps": -1}


def with_schedule(**section):
    """Return the parsed recipe with this section ``lr_schedule``."""
    return parse_recipe(recipe_text(lr_schedule=section), "r.yaml")


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_are_their_classes(alias):
    """A registered name gives the same schedule and the same rates as the class name."""
    settings = ARGUMENTS.get(alias, WARM_UP)
    made = []
    for name in (alias, ALIASES[alias]):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.01)
        made.append(with_schedule(type=name, **settings).schedule.make(optimizer, 10))
    short, full = made

    assert type(short) is type(full) is SCHEDULES[ALIASES[alias]]
    assert [short.rate(0.01, n) for n in range(11)] == [full.rate(0.01, n) for n in range(11)]


def test_an_unknown_name_gets_all_that_are_known():
    """The error for an unknown schedule lists all classes and registered names."""
    with pytest.raises(RecipeError, match=r"lr_schedule\.type: expected one of") as error:
        with_schedule(type="polinomial")

    assert all(repr(name) in str(error.value) for name in [*ALIASES, *SCHEDULES])


@pytest.mark.parametrize(
    ("section", "rate"),
    [
        ({"type": "CosineWithWarmUpLR", **WARM_UP}, "learning_rate"),
        ({"type": "CosineAnnealingLR", "base_lr": 0.01, "t_max": 4}, "base_lr"),
    ],
)
def test_the_optimizer_is_no_key_of_a_schedule(section, rate):
    """The schedule's `optimizer` cannot be set, and the error does not list it as a known key."""
    with pytest.raises(RecipeError, match=r"lr_schedule\.optimizer: unknown key") as error:
        with_schedule(**section, optimizer="AdamW")

    assert "r.yaml:" in str(error.value)
    assert f"'{rate}'" in str(error.value)
    assert "'optimizer'" not in str(error.value)


def test_a_misspelt_rate_gets_its_name():
    """A misspelled learning rate is an error that suggests the right name."""
    with pytest.raises(RecipeError, match="did you mean 'learning_rate'"):
        with_schedule(type="LinearWithWarmUpLR", warmup_steps=1, learnin_rate=0.01)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs Linux's /proc")
def test_an_output_folder_that_cannot_be_made():
    """A folder that is missing is made by the training; here, nothing can be made in its parent."""
    assert message("training.output_dir=/proc/run") == (
        "--set training.output_dir: expected a writable folder, or a path where one can be made, "
        "got '/proc/run': cannot write to the folder /proc: No such file or directory; choose a "
        "writable folder"
    )
