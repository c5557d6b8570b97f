"""Build recipes of small language models on data that a test provides."""

import json

from mfwrap.recipes.models.byte_tokenizer import byte_tokenizer
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


def save_tokenizer(folder, *tokens, template=None):
    """Save a tokenizer of bytes and further tokens with a chat template; return its folder."""
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<s>"})
    tokenizer.add_tokens(list(tokens), special_tokens=True)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(folder)
    return str(folder)


def learned(tokenizer, row):
    """Return the words of a prepared row that count in the loss, one text per part."""
    parts, former = [], False
    for token, label in zip(row["input_ids"], row["labels"], strict=True):
        if label != -100:
            assert label == token
            parts = parts if former else [*parts, []]
            parts[-1].append(token)
        former = label != -100
    return [tokenizer.decode(part) for part in parts]


def targets(trainer) -> list[str]:
    """Return the target texts of the rows of the first batch."""
    batch = next(iter(trainer.get_train_dataloader()))
    decode = trainer.processing_class.decode
    labels = batch["labels"].tolist()
    return [decode([token for token in row if token != -100]) for row in labels]
