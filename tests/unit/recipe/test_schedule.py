"""The section ``lr_schedule`` takes MindFormers' names and keys, and refuses others."""

import pytest
import torch

from mfwrap.recipe import RecipeError, parse_recipe
from mfwrap.schedules import SCHEDULES
from support.recipe_texts import recipe_text

ALIASES = {
    "constant_with_warmup": "ConstantWarmUpLR",
    "cosine": "CosineWithWarmUpLR",
    "cosine_annealing": "CosineAnnealingLR",
    "cosine_annealing_warm_restarts": "CosineAnnealingWarmRestarts",
    "cosine_with_restarts": "CosineWithRestartsAndWarmUpLR",
    "linear": "LinearWithWarmUpLR",
    "polynomial": "PolynomialWithWarmUpLR",
}
"""As MindFormers registers them in ``core/lr/build_lr.py``."""

ARGUMENTS = {
    "cosine_annealing": {"base_lr": 0.01, "t_max": 4},
    "cosine_annealing_warm_restarts": {"base_lr": 0.01, "t_0": 4},
}
WARM_UP = {"learning_rate": 0.01, "warmup_steps": 1, "total_steps": -1}


def parsed(**section):
    """Return the recipe with this section."""
    return parse_recipe(recipe_text(lr_schedule=section), "r.yaml")


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_are_their_classes(alias):
    """A schedule under its registered name is the one of its class, with the same rates."""
    settings = ARGUMENTS.get(alias, WARM_UP)
    made = []
    for name in (alias, ALIASES[alias]):
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.01)
        made.append(parsed(type=name, **settings).schedule.make(optimizer, 10))
    short, full = made

    assert type(short) is type(full) is SCHEDULES[ALIASES[alias]]
    assert [short.rate(0.01, n) for n in range(11)] == [full.rate(0.01, n) for n in range(11)]


def test_an_unknown_name_gets_all_that_are_known():
    """The error lists classes and registered names."""
    with pytest.raises(RecipeError, match=r"lr_schedule\.type: expected one of") as error:
        parsed(type="polinomial")

    assert all(repr(name) in str(error.value) for name in [*ALIASES, *SCHEDULES])


@pytest.mark.parametrize(
    ("section", "rate"),
    [
        ({"type": "CosineWithWarmUpLR", **WARM_UP}, "learning_rate"),
        ({"type": "CosineAnnealingLR", "base_lr": 0.01, "t_max": 4}, "base_lr"),
    ],
)
def test_the_optimizer_is_no_key_of_a_schedule(section, rate):
    """It is the run's own: the error names the keys that are known, and not this one."""
    with pytest.raises(RecipeError, match=r"lr_schedule\.optimizer: unknown key") as error:
        parsed(**section, optimizer="AdamW")

    assert "r.yaml:" in str(error.value)
    assert f"'{rate}'" in str(error.value)
    assert "'optimizer'" not in str(error.value)


def test_a_misspelt_rate_gets_its_name():
    """The rate is among the keys that are known."""
    with pytest.raises(RecipeError, match="did you mean 'learning_rate'"):
        parsed(type="LinearWithWarmUpLR", warmup_steps=1, learnin_rate=0.01)
