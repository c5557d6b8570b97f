"""The sections ``lr_schedule`` and ``grouped_lr_schedule`` set the rates of the training."""

import json

import pytest
import torch

from mfwrap.runner import RecipeError, parse_recipe, run_recipe
from mfwrap.schedules import SCHEDULES
from support.recipe_texts import message, parsed, recipe_text


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


GROUPED = {
    "default": {"type": "LinearWithWarmUpLR", "learning_rate": 0.01, "warmup_steps": 0},
    "grouped": [
        {
            "type": "ConstantWarmUpLR",
            "params": ["*.bias"],
            "learning_rate": 0.5,
            "warmup_steps": 4,
            "total_steps": -1,
        },
        {"type": "CosineWithWarmUpLR", "params": ["output", "layers.0"], "warmup_steps": 2},
    ],
}
"""MindFormers' section for a perceptron."""


@pytest.mark.parametrize("optimizer", [None, {"type": "Muon"}], ids=["AdamW", "Muon"])
def test_a_schedule_for_each_group(tmp_path, optimizer):
    """Each group has its own rates, in the Trainer's log and in the records, with any optimizer."""
    training = {"output_dir": str(tmp_path), "logging_steps": 1, "report_to": "none"}
    recipe = parsed(grouped_lr_schedule=GROUPED, optimizer=optimizer, training=training)
    assert recipe.arguments.learning_rate == 0.01
    run_recipe(recipe)
    lines = (tmp_path / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    rates = [record["learning_rates"] for record in map(json.loads, lines) if "loss" in record]

    assert [set(each) for each in rates] == [{"default", "*.bias", "output,layers.0"}] * 6
    assert [each["default"] for each in rates] == pytest.approx(
        [0.01 * (1 - step / 6) for step in range(6)]
    )
    assert [each["*.bias"] for each in rates] == pytest.approx([0, 0.125, 0.25, 0.375, 0.5, 0.5])
    assert rates[2]["output,layers.0"] == pytest.approx(0.01)


@pytest.mark.parametrize(
    ("grouped", "says"),
    [
        ({"grouped": []}, "grouped_lr_schedule.default: required, but missing"),
        (GROUPED | {"other": 1}, "grouped_lr_schedule.other: unknown key"),
        (
            GROUPED | {"grouped": [{"type": "ConstantWarmUpLR", "warmup_steps": 1}]},
            "grouped_lr_schedule.grouped.0.params: expected a list of parts of parameters' names",
        ),
        (
            GROUPED | {"grouped": [GROUPED["grouped"][0], GROUPED["grouped"][0]]},
            "grouped.1.params: expected other patterns than those of an earlier group",
        ),
        (
            GROUPED | {"grouped": [{"type": "ConstantLR", "params": ["output"]}]},
            "grouped_lr_schedule.grouped.0.type: expected one of",
        ),
        (
            GROUPED | {"grouped": [GROUPED["grouped"][0] | {"params": ["embed_tokens"]}]},
            "that no earlier group has, got ['embed_tokens'], which match none",
        ),
    ],
)
def test_a_wrong_group_is_named(grouped, says):
    """An error names the group, also if no parameter of the model matches its patterns."""
    assert says in message(text=recipe_text(grouped_lr_schedule=grouped))


def test_other_schedules_contradict_grouped_ones():
    """The section replaces ``lr_schedule`` and the Trainer's schedule, so they must be left out."""
    section = {"type": "ConstantWarmUpLR", "learning_rate": 0.01, "warmup_steps": 1}
    says = "must be left out, because the recipe has a section grouped_lr_schedule"
    for sections in ({"lr_schedule": section}, {"training": {"warmup_steps": 3}}):
        assert says in message(text=recipe_text(grouped_lr_schedule=GROUPED, **sections))


def test_an_optimizer_that_groups_parameters_itself():
    """Optimizers that choose parameters by name cannot have groups with other schedules."""
    training = {"optim": "galore_adamw", "optim_target_modules": ["output"]}
    says = "training.optim: must be an optimizer that takes parameter groups"
    assert says in message(text=recipe_text(grouped_lr_schedule=GROUPED, training=training))
