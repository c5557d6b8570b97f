"""The ranges of training arguments, which ``TrainingArguments`` does not check."""

import math
import sys
from collections.abc import Mapping
from typing import Any

from mfwrap.runner.document import Path
from mfwrap.runner.objects import RecipeObjects

_RANGES: Mapping[str, tuple[float | None, float | None]] = {
    "per_device_train_batch_size": (1, 2**31),
    "per_device_eval_batch_size": (1, 2**31),
    "gradient_accumulation_steps": (1, 2**31),
    "num_train_epochs": (0, 10**9),
    "max_steps": (-1, 10**12),
    "learning_rate": (0, sys.float_info.max),
    "warmup_steps": (0, 10**12),
    "weight_decay": (0, sys.float_info.max),
    "adam_beta1": (0, 1),
    "adam_beta2": (0, 1),
    "adam_epsilon": (0, sys.float_info.max),
    "max_grad_norm": (0, None),
    "logging_steps": (None, 10**12),
    "eval_steps": (None, 10**12),
    "save_steps": (None, 10**12),
    "save_total_limit": (1, None),
    "eval_accumulation_steps": (1, 2**31),
    "eval_delay": (0, None),
    "dataloader_num_workers": (0, 1_000),
    "seed": (0, 2**32),
    "data_seed": (0, 2**32),
    "max_length": (2, 2**31),
    "max_completion_length": (1, 2**31),
    "num_iterations": (1, 2**31),
    "beta": (0, sys.float_info.max),
}
"""Minimum and maximum of each field; ``None`` for no limit. ``TrainingArguments`` does not check
them, but training fails or never begins outside of them. A maximum also excludes infinity."""

_BELOW_MAXIMUM = frozenset({"adam_beta1", "adam_beta2", "seed", "data_seed"})
"""Fields that must be less than their maximum."""


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
    least, most = _RANGES.get(key, (None, None))
    # The comparisons are negated so that nan is an error, too.
    says = ""
    if least is not None and not value >= least:
        says = f">= {least}"
    elif key in _BELOW_MAXIMUM and not value < most:
        says = f"< {most}"
    elif most is not None and not value <= most:
        says = f"<= {most}"
    elif math.isnan(value):
        says = "that is not nan"
    if says:
        raise objects.document.error(path, f"expected a number {says}, got {value}")


def is_number(value: Any) -> bool:
    """Return whether a value is a number; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)
