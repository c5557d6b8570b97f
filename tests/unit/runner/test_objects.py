"""A mutated recipe is valid, or refused with a one-line error that names the key."""

import copy
import dataclasses
import enum
import functools
import os
import random
import socket
import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import distributed, nn, optim

from mfwrap.runner import Recipe, RecipeError, parse_recipe
from mfwrap.runner.document import RecipeDocument
from mfwrap.runner.objects import RecipeObjects
from support.mutations import MINDFORMERS, change_value
from support.recipe_texts import RECIPE

WHOLE = copy.deepcopy(RECIPE) | MINDFORMERS


def mutated(draw: random.Random) -> tuple[dict, tuple]:
    """Return a mutated recipe, and the path of the key that was changed."""
    recipe = copy.deepcopy(WHOLE)
    return recipe, change_value(draw, recipe)


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


@pytest.mark.parametrize(
    ("section", "key"),
    [
        ("data", "columns"),
        ("data", "eval_fraction"),
        ("data", "max_eval_samples"),
        ("training", "learning_rate"),
        ("training", "output_dir"),
        ("training", "lr_scheduler_type"),
        ("runner_wrapper", "local_norm"),
        ("ema", "decay"),
        ("callbacks.0", "per_print_times"),
        ("monitor_config", "step_interval"),
    ],
)
def test_a_null_removes_a_setting(section, key):
    """A null has the effect of leaving the setting out, in the file and as an override."""
    recipe = copy.deepcopy(RECIPE) | {"callbacks": [{"type": "MFLossMonitor"}]}
    recipe |= {"monitor_config": {"monitor_on": True}, "runner_wrapper": {}, "ema": {}}
    index, *_ = [*section.split(".")[1:], None]
    inner = recipe["callbacks"][0] if index else recipe[section]
    inner.pop(key, None)
    text = yaml.safe_dump(recipe)
    without = parse_recipe(text, "r.yaml")
    null = parse_recipe(text, "r.yaml", [f"{section}.{key}=null"])

    def made(recipe):
        callbacks = [make.keywords for make in recipe.make_callbacks]
        return [recipe.data, recipe.step.config, recipe.make_average.keywords, callbacks]

    assert made(null) == made(without)
    arguments = null.arguments.to_dict(), without.arguments.to_dict()
    assert arguments[0] == arguments[1]


def test_a_null_that_means_something():
    """A null stays where ``None`` is a value, and a required setting cannot be removed."""
    recipe = copy.deepcopy(RECIPE)
    recipe.setdefault("runner_wrapper", {})["max_consecutive_skips"] = None

    assert checked(recipe).step.config.max_consecutive_skips is None
    assert "data.type: required" in str(checked(recipe | {"data": {"type": None}}))
    assert "expected a string, got None" in str(checked(recipe | {"task": None}))
    assert checked(recipe | {"callbacks": None}).make_callbacks == ()


def check_mutation(draw):
    """Assert that a mutated recipe is valid, or refused in one line that names key or section."""
    recipe, path = mutated(draw)
    result = checked(recipe)
    if isinstance(result, Recipe):
        return
    text = str(result)
    named = {str(part) for part in path if not isinstance(part, int)} | {str(path[0])}

    assert "\n" not in text
    assert any(part in text for part in named), text


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=True))
def test_mutated_recipes(draw):
    """A mutated recipe is valid, or refused with a one-line error."""
    check_mutation(draw)


@pytest.mark.slow
@settings(max_examples=300, suppress_health_check=[HealthCheck.too_slow])
@given(st.randoms(use_true_random=True))
def test_many_mutated_recipes(draw):
    """Each of many more mutated recipes is valid, or refused with a one-line error."""
    check_mutation(draw)


def listen_at_a_taken_port(seed: int, **_: object) -> None:
    """Fail like the process group of a training whose port is taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", seed))
        distributed.TCPStore("127.0.0.1", seed, is_master=True, use_libuv=False)


def read_a_number_of_ranks(**_: object) -> int:
    """Fail like a training with a wrong number in the environment."""
    return int("10 ranks", base=10)


def read_a_setting_of_the_system(**_: object) -> str:
    """Fail like a training without a variable of its launcher."""
    return os.environ["weight_decay"]  # noqa: SIM112  (named like the key)


def write_to_a_folder_without_permission(**_: object) -> None:
    """Fail like a training whose cache cannot be written."""
    Path("/proc/runs").mkdir()


def allocate_too_much(**_: object) -> np.ndarray:
    """Fail like a training without enough memory."""
    return np.empty((2**10, 2**40))


@pytest.mark.parametrize(
    "make",
    [
        allocate_too_much,
        listen_at_a_taken_port,
        read_a_number_of_ranks,
        read_a_setting_of_the_system,
        write_to_a_folder_without_permission,
    ],
)
def test_an_error_that_no_setting_causes(make):
    """An error names no key, although its text holds keys or their values."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    settings = {"seed": port, "max_steps": 10, "weight_decay": 2**10, "output_dir": "runs"}
    objects = RecipeObjects(RecipeDocument("r.yaml", {}, {}))

    with pytest.raises(RecipeError) as caught:
        objects.build(("training",), make, settings, known=settings.keys())

    assert any(str(word) in str(caught.value) for pair in settings.items() for word in pair)
    assert str(caught.value).startswith("r.yaml: training: failed with ")


@pytest.mark.parametrize(
    ("kind", "settings", "key"),
    [
        # The message names momentum: "Nesterov momentum requires a momentum and zero dampening".
        (optim.SGD, {"lr": 0.1, "momentum": 0, "nesterov": True}, "nesterov"),
        # The message names no key: "Invalid beta parameter at index 1: 2.0".
        (optim.AdamW, {"lr": 0.1, "betas": [0.9, 2.0]}, "betas"),
    ],
)
def test_the_key_without_which_a_construction_succeeds(kind, settings, key):
    """An error names the key that causes it, whatever keys its text holds."""
    make = functools.partial(kind, [nn.Parameter(torch.zeros(1))])
    objects = RecipeObjects(RecipeDocument("r.yaml", {}, {}))

    with pytest.raises(RecipeError, match=rf"^r\.yaml: optimizer\.{key}: invalid: "):
        objects.build(("optimizer",), make, settings)


class Color(enum.Enum):
    """An enumeration of the user's own."""

    RED = "red"


@dataclasses.dataclass
class Size:
    """A dataclass of the user's own."""

    width: int
    height: int = 2


@pytest.mark.parametrize(
    ("declared", "written", "wanted"),
    [
        (Path, "a/b", Path("a/b")),
        (Color, "red", Color.RED),
        (Size, {"width": 1}, Size(1, 2)),
        (list[Size], [{"width": 1}], [Size(1, 2)]),
        (set[str], ["a"], {"a"}),
        (tuple[int, int], [1, 2], (1, 2)),
        (Path | None, None, None),
        (str | Path, "a/b", "a/b"),
        (Iterable[int], [1, 2], [1, 2]),
        (nn.Module, "a", "a"),
    ],
    ids=str,
)
def test_an_argument_has_the_declared_type(declared, written, wanted):
    """A class of the user's own gets values of the types that its signature declares."""

    class Own:
        def __init__(self, value):
            pass

    Own.__init__.__annotations__["value"] = declared
    objects = RecipeObjects(RecipeDocument("r.yaml", {}, {}))

    found = objects.checked_arguments(("model",), Own, {"value": written})

    assert found == {"value": wanted}
    assert type(found["value"]) is type(wanted)


def test_an_argument_without_the_declared_type():
    """A value that cannot have the declared type is refused."""

    def own(color: Color):
        pass

    objects = RecipeObjects(RecipeDocument("r.yaml", {}, {}))

    with pytest.raises(RecipeError, match=r"^r\.yaml: model\.color: expected 'red', got 'blue'"):
        objects.checked_arguments(("model",), own, {"color": "blue"})


@pytest.mark.parametrize("target", ["link", "missing"])
def test_an_output_folder_that_is_a_link_to_nothing(tmp_path, target):
    """A link to itself or to a missing folder is refused: no folder can be made in its place."""
    link = tmp_path / "link"
    link.symlink_to(tmp_path / target)
    objects = RecipeObjects(RecipeDocument("r.yaml", {}, {}))

    for folder in (link, link / "run"):
        with pytest.raises(RecipeError, match=r"expected a writable folder, .*/link' is not a fol"):
            objects.check_folder(("training", "output_dir"), str(folder))
