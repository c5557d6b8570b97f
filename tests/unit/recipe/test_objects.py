"""A mutated recipe is valid, or refused with a one-line error that names the key."""

import copy
import warnings

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mfwrap.recipe import Recipe, RecipeError, parse_recipe
from support.recipe_texts import RECIPE

WHOLE = copy.deepcopy(RECIPE) | {
    "runner_wrapper": {
        "type": "MFTrainOneStepCell",
        "scale_sense": {
            "type": "DynamicLossScaleUpdateCell",
            "loss_scale_value": 1024,
            "scale_factor": 2,
            "scale_window": 3,
        },
        "use_clip_grad": True,
        "max_grad_norm": 1.0,
        "local_norm": True,
    },
    "lr_schedule": {"type": "CosineWithWarmUpLR", "lr_end": 1e-3, "warmup_steps": 2},
    "optimizer": {"type": "AdamW", "betas": [0.9, 0.95], "eps": 1e-8},
    "ema": {"decay": 0.9, "warmup": True},
    "callbacks": [{"type": "MFLossMonitor", "per_print_times": 2}],
    "monitor_config": {"monitor_on": False, "step_interval": 1},
}
VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.sampled_from([0, -1, 1, 2, 7, 10**12, -(10**12), 0.5, 1.5, float("inf"), float("nan")]),
    st.sampled_from(["", "x", "no", "bytes", "../..", "1e-3", "a: b", "MFLossMonitor", "ä"]),
    st.sampled_from([[], [1, "a"], {}, {"type": "x"}, {"a": {"b": [None]}}]),
)


def paths(value, at=()):
    """Yield the path of every value."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        yield (*at, key)
        if isinstance(inner, (dict, list)):
            yield from paths(inner, (*at, key))


@st.composite
def mutations(draw):
    """Return a mutated recipe, and the key that was changed."""
    recipe = copy.deepcopy(WHOLE)
    path = draw(st.sampled_from(sorted(paths(recipe), key=str)))
    holder = recipe
    for key in path[:-1]:
        holder = holder[key]
    key = path[-1]
    kinds = ["replace", "remove", "rename", "add"]
    kind = draw(st.sampled_from(kinds if isinstance(holder, dict) else kinds[:2]))
    if kind == "replace":
        holder[key] = draw(VALUES)
    elif kind == "remove":
        del holder[key]
    elif kind == "rename":
        key = f"{key}{draw(st.sampled_from(['s', '_', 'x']))}"
        holder[key] = holder.pop(path[-1])
    else:
        key = draw(st.sampled_from(["extra", "learning_rates", "decay_", "typ"]))
        holder[key] = draw(VALUES)
    return recipe, (*path[:-1], key)


def checked(recipe) -> Recipe | RecipeError:
    """Parse a recipe; return the result, or the error if it is refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return parse_recipe(yaml.safe_dump(recipe, allow_unicode=True), "r.yaml")
        except RecipeError as error:
            return error


def test_the_whole_recipe_is_valid():
    """The recipe is valid before it is mutated."""
    assert isinstance(checked(WHOLE), Recipe)


def check_mutation(mutation):
    """Assert that a mutated recipe is valid, or refused in one line that names key or section."""
    recipe, path = mutation
    result = checked(recipe)
    if isinstance(result, Recipe):
        return
    text = str(result)
    named = {str(part) for part in path if not isinstance(part, int)} | {str(path[0])}

    assert "\n" not in text
    assert any(part in text for part in named), text


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(mutations())
def test_mutated_recipes(mutation):
    """A mutated recipe is valid, or refused with a one-line error."""
    check_mutation(mutation)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(mutations())
def test_many_mutated_recipes(mutation):
    """Each of many more mutated recipes is valid, or refused with a one-line error."""
    check_mutation(mutation)
