"""The ranges of training arguments, which ``TrainingArguments`` does not check."""

import math
import sys
from collections.abc import Mapping
from typing import Any

from mfwrap.runner.document import Path
from mfwrap.runner.objects import RecipeObjects

_AT_LEAST: Mapping[str, float] = {
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "num_train_epochs": 0,
    "max_steps": -1,
    "learning_rate": 0,
    "warmup_steps": 0,
    "weight_decay": 0,
    "adam_beta1": 0,
    "adam_beta2": 0,
    "adam_epsilon": 0,
    "max_grad_norm": 0,
    "save_total_limit": 1,
    "eval_accumulation_steps": 1,
    "eval_delay": 0,
    "dataloader_num_workers": 0,
    "seed": 0,
    "data_seed": 0,
    "max_length": 2,
}
"""Minimum of each field. ``TrainingArguments`` does not check it, but training fails below it."""

_AT_MOST: Mapping[str, float] = {
    "per_device_train_batch_size": 2**31,
    "per_device_eval_batch_size": 2**31,
    "gradient_accumulation_steps": 2**31,
    "max_steps": 10**12,
    "num_train_epochs": 10**9,
    "learning_rate": sys.float_info.max,
    "weight_decay": sys.float_info.max,
    "adam_epsilon": sys.float_info.max,
    "warmup_steps": 10**12,
    "logging_steps": 10**12,
    "eval_steps": 10**12,
    "save_steps": 10**12,
    "eval_accumulation_steps": 2**31,
    "dataloader_num_workers": 1_000,
    "max_length": 2**31,
}
"""Maximum of each field. Above it, training fails or never begins. Infinity is above it, too."""

_LESS_THAN: Mapping[str, float] = {
    "adam_beta1": 1,
    "adam_beta2": 1,
    "seed": 2**32,
    "data_seed": 2**32,
}


def check_range(objects: RecipeObjects, path: Path, key: str, value: Any) -> None:
    """Check a number.

    Args:
        objects: Builder for the recipe.
        path: Path of the number.
        key: Field of ``TrainingArguments`` that gets the number.
        value: The number. A value that is not a number is accepted.

    Raises:
        RecipeError: If the number is out of range.
    """
    if not is_number(value):
        return
    # The comparisons are negated so that nan is an error, too.
    says = ""
    if key in _AT_LEAST and not value >= _AT_LEAST[key]:
        says = f">= {_AT_LEAST[key]}"
    elif key in _LESS_THAN and not value < _LESS_THAN[key]:
        says = f"< {_LESS_THAN[key]}"
    elif key in _AT_MOST and not value <= _AT_MOST[key]:
        says = f"<= {_AT_MOST[key]}"
    elif math.isnan(value):
        says = "that is not nan"
    if says:
        raise objects.document.error(path, f"expected a number {says}, got {value}")


def is_number(value: Any) -> bool:
    """Return whether a value is a number; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
