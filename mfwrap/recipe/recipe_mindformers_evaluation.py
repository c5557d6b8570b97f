"""When a MindFormers file evaluates, in the words of the Trainer, which has one interval only."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

__all__ = ["evaluation"]

_DEFAULT_STEPS = 100
"""MindFormers' ``eval_step_interval`` where it is not given, or 0."""


def evaluation(
    steps: int | None, epochs: int | None, training: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the training's keys for an evaluation, and notes about what they do not say.

    Args:
        steps: MindFormers' ``eval_step_interval``; < 0 for none.
        epochs: MindFormers' ``eval_epoch_interval``; < 0 for none.
        training: The other keys of the training.
    """
    by_steps: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": steps or _DEFAULT_STEPS}
    if epochs is None or epochs <= 0:
        if by_steps["eval_steps"] > 0:
            return by_steps, []
        return {}, ["training: no interval of evaluation is > 0, so once, at its end"]
    if steps is not None and steps > 0:
        return by_steps, [f"training: without eval_epoch_interval {epochs}, beside that of steps"]
    keys, notes = _by_epochs(epochs, training)
    if not steps:
        notes.append(f"training: without eval_step_interval {_DEFAULT_STEPS}, a default")
    return keys, notes


def _by_epochs(epochs: int, training: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    if epochs == 1:
        return {"eval_strategy": "epoch"}, []
    length = training.get("num_train_epochs")
    if not isinstance(length, int) or length < 1 or "max_steps" in training:
        says = f"training: evaluates after every epoch, not every {epochs} epochs"
        return {"eval_strategy": "epoch"}, [says]
    if epochs >= length:
        return {}, [f"training: has no evaluation before epoch {epochs}, so once, at its end"]
    part = epochs / length
    if Fraction(part) > Fraction(epochs, length):  # the Trainer rounds up: one step too late
        part = math.nextafter(part, 0)
    says = f"training: {epochs} of {length} epochs are eval_steps, a part of the training"
    return {"eval_strategy": "steps", "eval_steps": part}, [says]
