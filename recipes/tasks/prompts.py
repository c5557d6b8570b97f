"""Build the Trainer's keyword arguments for tasks in which the model answers prompts itself."""

from typing import Any

from transformers import AutoModelForCausalLM

from mfwrap.recipes.data.source import DataSource, Rows
from mfwrap.recipes.models.loading import ModelError
from mfwrap.recipes.models.settings import ModelSettings, make_text_model


def build_prompts(model: ModelSettings, data: DataSource, rows: Rows) -> dict[str, Any]:
    """Return keyword arguments of a Trainer of TRL that samples answers to prompts.

    The rows keep all columns: rewards get them.

    Args:
        model: Section ``model``.
        data: Section ``data``.
        rows: Rows of the data.

    Raises:
        ModelError: If the tokenizer has no end token.
    """
    del data
    tokenizer = model.make_tokenizer()
    if tokenizer.eos_token is None:
        key = "path" if model.tokenizer is None else "tokenizer"
        msg = (
            f"`{key}` must have a tokenizer with an end token, which ends answers, got one without "
            "it; set eos_token in its tokenizer_config.json"
        )
        raise ModelError(msg)
    return {
        "model": make_text_model(model, AutoModelForCausalLM, tokenizer),
        "train_dataset": rows.train,
        "eval_dataset": rows.evaluation,
        "processing_class": tokenizer,
    }


def prompt_tokens(tokenizer: Any, prompt: Any, **template: Any) -> list[int]:
    """Return the tokens of a prompt, as trainers of TRL that generate answers make them.

    Args:
        tokenizer: The tokenizer.
        prompt: A text, or a list of messages.
        template: Settings of the chat template.
    """
    if isinstance(prompt, str):
        ids: list[int] = tokenizer(prompt)["input_ids"]
    else:
        ids = tokenizer.apply_chat_template(
            prompt, add_generation_prompt=True, tokenize=True, return_dict=True, **template
        )["input_ids"]
    return ids
