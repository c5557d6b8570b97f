"""Convert MindFormers' intervals of evaluation."""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from mfwrap.runner.document import shown
from mfwrap.runner.mindformers.source import SourceFile

_DEFAULT_STEPS = 100
"""MindFormers' ``eval_step_interval`` if it is missing or 0."""


def take_evaluation(source: SourceFile, training: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of ``training`` that set evaluation; none if the file does not evaluate.

    Args:
        source: File, whose keys about evaluation are taken.
        training: Other keys of the section ``training``.

    Raises:
        RecipeError: If an interval is not an integer.
    """
    evaluates = source.flag("do_eval")
    steps, epochs = (_interval(source, f"eval_{unit}_interval") for unit in ("step", "epoch"))
    size = source.integer("eval_dataset", "batch_size", default=0, minimum=0)
    if not evaluates:
        return {}
    keys, notes = evaluation(steps, epochs, training)
    source.notes += notes
    return keys | ({"per_device_eval_batch_size": size} if size else {})


def _interval(source: SourceFile, name: str) -> int | None:
    value = source.take(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
        raise source.document.error((name,), f"expected an integer, got {shown(value)}")
    return value


def evaluation(
    steps: int | None, epochs: int | None, training: Mapping[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """Return the keys of ``training`` that set evaluation at MindFormers' intervals, and notes.

    Args:
        steps: MindFormers' ``eval_step_interval``; < 0 for no evaluation by steps. ``None`` and 0
            stand for MindFormers' default, unless `epochs` is > 0.
        epochs: MindFormers' ``eval_epoch_interval``; <= 0 or ``None`` for no evaluation by epochs.
        training: Other keys of the section ``training``.
    """
    by_steps: dict[str, Any] = {"eval_strategy": "steps", "eval_steps": steps or _DEFAULT_STEPS}
    if epochs is None or epochs <= 0:
        if by_steps["eval_steps"] > 0:
            return by_steps, []
        return {}, ["training: no evaluation interval is > 0; evaluates once, at the end"]
    if steps is not None and steps > 0:
        return by_steps, ["eval_epoch_interval: left out, because eval_step_interval is set"]
    keys, notes = _by_epochs(epochs, training)
    if not steps:
        says = f"left out (default {_DEFAULT_STEPS}), because eval_epoch_interval is set"
        notes.append(f"eval_step_interval: {says}")
    return keys, notes


def _by_epochs(epochs: int, training: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    note = "eval_epoch_interval: "
    if epochs == 1:
        return {"eval_strategy": "epoch"}, []
    length = training.get("num_train_epochs")
    if not isinstance(length, int) or length < 1 or "max_steps" in training:
        return {"eval_strategy": "epoch"}, [f"{note}evaluates every epoch, not every {epochs}"]
    if epochs >= length:
        return {}, [f"{note}the training has {length} epochs; evaluates once, at the end"]
    share = epochs / length
    # The Trainer multiplies the share by the length of the training, and rounds up to whole steps.
    # If floating point had rounded the share up, each evaluation would be one step too late.
    if Fraction(share) > Fraction(epochs, length):
        share = math.nextafter(share, 0)
    says = f"{note}becomes eval_steps, a share of the training ({epochs} of {length} epochs)"
    return {"eval_strategy": "steps", "eval_steps": share}, [says]
