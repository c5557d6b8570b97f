"""Build recipes of small language models on data that a test provides."""

import json

from mfwrap.runner import parse_recipe
from mfwrap.runner.run import build_trainer
from support.recipe_texts import SMALL_LLAMA, recipe_text

LANGUAGE = {"config": SMALL_LLAMA, "tokenizer": "bytes"}


def recipe_of(task, data, *overrides, model=None, **training):
    """Return a small recipe for `task`, with `data` as its section ``data``."""
    text = recipe_text(task=task, model=None, data=None, training=training)
    sections = {"model": model or LANGUAGE, "data": data}
    lines = [f"{name}: {json.dumps(section)}\n" for name, section in sections.items()]
    return parse_recipe(text + "".join(lines), "r", overrides)


def trainer_of(*arguments, **keywords):
    """Return the Trainer of a recipe, for the same arguments as `recipe_of`."""
    return build_trainer(recipe_of(*arguments, **keywords))[0]
