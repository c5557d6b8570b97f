"""Small recipes that several tests read and run."""

import copy

import pytest
import yaml

from mfwrap.runner import Recipe, RecipeError, parse_recipe

SMALL_LLAMA = {
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 64,
}
BERT = {
    "config": {
        "model_type": "bert",
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "max_position_embeddings": 64,
    },
    "tokenizer": "bytes",
}
PERCEPTRON = {"config": {"model_type": "perceptron", "hidden_size": 8, "num_hidden_layers": 1}}
VIT = {
    "config": {
        "model_type": "vit",
        "patch_size": 4,
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
    }
}
RECIPE = {
    "task": "regression",
    "model": PERCEPTRON,
    "data": {"type": "diabetes", "max_train_samples": 64, "max_eval_samples": 16},
    "training": {
        "max_steps": 6,
        "per_device_train_batch_size": 8,
        "learning_rate": 0.01,
        "logging_steps": 2,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "seed": 3,
    },
}
"""A recipe whose run takes a tenth of a second."""


def recipe_text(**sections) -> str:
    """Return `RECIPE` as YAML, with `sections` merged in; a section of ``None`` is removed."""
    recipe = copy.deepcopy(RECIPE)
    for name, section in sections.items():
        if section is None:
            recipe.pop(name, None)
        elif isinstance(section, dict) and isinstance(recipe.get(name), dict):
            recipe[name] |= section
        else:
            recipe[name] = section
    return yaml.safe_dump(recipe, sort_keys=False)


def parsed(**sections) -> Recipe:
    """Return the parsed and checked recipe, for the same arguments as `recipe_text`."""
    return parse_recipe(recipe_text(**sections), "r.yaml")


def message(*overrides: str, text: str | None = None) -> str:
    """Parse an invalid recipe, and return the error message, which must be one line."""
    with pytest.raises(RecipeError) as error:
        parse_recipe(recipe_text() if text is None else text, "r.yaml", overrides)
    assert "\n" not in str(error.value)
    return str(error.value)
