"""Build the Trainer's keyword arguments for rows that are the inputs of the model already."""

from typing import Any

from transformers import DataCollatorWithPadding, default_data_collator

from mfwrap.recipes.data.source import Rows
from mfwrap.recipes.models.settings import ModelSettings


def build_for_inputs(model: ModelSettings, auto_class: Any, rows: Rows) -> dict[str, Any]:
    """Return the Trainer's keyword arguments for rows that no task prepares.

    Args:
        model: Section ``model``. Its tokenizer, if it names one, is saved with the model.
        auto_class: See `ModelSettings.make_model`.
        rows: Rows that are dictionaries with the arguments of the model's ``forward``.
    """
    has_tokenizer = model.tokenizer is not None or model.path is not None
    tokenizer = model.make_tokenizer() if has_tokenizer and auto_class is not None else None
    return {
        "model": model.make_model(auto_class),
        "train_dataset": rows.train,
        "eval_dataset": rows.evaluation,
        # As the Trainer would choose.
        "data_collator": default_data_collator
        if tokenizer is None
        else DataCollatorWithPadding(tokenizer),
        "processing_class": tokenizer,
    }
