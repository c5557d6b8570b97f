"""The arguments of a recipe's training, from its own section and from MindFormers' sections."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

import torch
from transformers import TrainingArguments

from mfwrap.recipe.objects import RecipeObjects
from mfwrap.recipe.recipe_format import RunnerWrapperSection
from mfwrap.recipe.recipe_schedule import ScheduleChoice, read_schedule
from mfwrap.recipe.sections import OPTIMIZER_KEYS_WITHOUT_MEANING, OPTIMIZERS

__all__ = ["TrainingChoice", "read_training"]

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
"""What the arguments themselves let through, and training fails of."""

_LESS_THAN: Mapping[str, float] = {
    "adam_beta1": 1,
    "adam_beta2": 1,
    "seed": 2**32,
    "data_seed": 2**32,
}


class TrainingChoice(NamedTuple):
    """How a recipe trains."""

    arguments: TrainingArguments
    schedule: ScheduleChoice | None
    """MindFormers' schedule; ``None`` for the one that the arguments name."""


def read_training(
    objects: RecipeObjects,
    kind: type[TrainingArguments],
    *,
    name: str,
    training: Mapping[str, Any],
    wrapper: RunnerWrapperSection | None,
    optimizer: Mapping[str, Any] | None,
    lr_schedule: Mapping[str, Any] | None,
) -> TrainingChoice:
    """Return the arguments of the training and its schedule.

    Args:
        objects: Builds them.
        kind: Class of the arguments.
        name: Of the recipe, for the folder of the run where none is given.
        training: Section ``training``.
        wrapper: Section ``runner_wrapper``.
        optimizer: Section ``optimizer``.
        lr_schedule: Section ``lr_schedule``.

    Raises:
        RecipeError: If a setting is unknown, out of range, or given twice.
    """
    known = {field.name for field in fields(kind) if field.init}
    settings = objects.kept(("training",), training, known)
    for key, value in settings.items():
        objects.check_type(("training", key), kind, key, value)
        _check_range(objects, key, value)
    settings.setdefault("output_dir", f"runs/{name}")
    if not torch.accelerator.is_available():
        # torch warns of the one; TRL's default of the other is for accelerators.
        settings = {"dataloader_pin_memory": False, "bf16": False} | settings
    if optimizer is not None:
        _take_over(objects, settings, _optimizer_arguments(objects, optimizer), "optimizer")
    schedule = None
    if lr_schedule is not None:
        max_steps = settings.get("max_steps", -1)
        schedule, rate = read_schedule(objects, ("lr_schedule",), lr_schedule, max_steps)
        _refuse_another_schedule(objects, training)
        if rate is not None:
            _take_over(objects, settings, {"learning_rate": rate}, "lr_schedule")
    if wrapper is not None:
        settings["max_grad_norm"] = _max_grad_norm(objects, training, wrapper)
    return TrainingChoice(objects.build(("training",), kind, settings, known=known), schedule)


def _check_range(objects: RecipeObjects, key: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return
    # Written so that nan is refused.
    if key in _AT_LEAST and not value >= _AT_LEAST[key]:
        says = f"must be >= {_AT_LEAST[key]}, got {value}"
        raise objects.document.error(("training", key), says)
    if key in _LESS_THAN and not value < _LESS_THAN[key]:
        says = f"must be < {_LESS_THAN[key]}, got {value}"
        raise objects.document.error(("training", key), says)


def _optimizer_arguments(objects: RecipeObjects, section: Mapping[str, Any]) -> dict[str, Any]:
    settings = dict(section)
    name = settings.pop("type", None)
    if not isinstance(name, str) or name not in OPTIMIZERS:
        says = f"must be one of {sorted(OPTIMIZERS)}, got {name!r}"
        raise objects.document.error(("optimizer", "type"), says)
    known = {"betas", "beta1", "beta2", "eps", "weight_decay", "learning_rate"}
    settings = objects.kept(("optimizer",), settings, known, OPTIMIZER_KEYS_WITHOUT_MEANING)
    arguments: dict[str, Any] = {"optim": OPTIMIZERS[name]}
    betas = settings.pop("betas", None)
    if betas is not None:
        if not isinstance(betas, list) or len(betas) != 2:
            raise objects.document.error(("optimizer", "betas"), f"must be two, got {betas!r}")
        settings |= {"beta1": betas[0], "beta2": betas[1]}
    names = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_epsilon"}
    for key, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
            at = "betas" if betas is not None and key.startswith("beta") else key
            raise objects.document.error(("optimizer", at), f"must be a number >= 0, got {value!r}")
        arguments[names.get(key, key)] = value
    return arguments


def _take_over(
    objects: RecipeObjects, settings: dict[str, Any], others: Mapping[str, Any], section: str
) -> None:
    for key, value in others.items():
        if key in settings and settings[key] != value:
            says = f"must be what `{section}` says, {value!r}, or left out, got {settings[key]!r}"
            path = ("training", key)
            if path not in objects.document.places:  # `optimizer` has said it, by the same key
                path = ("optimizer", key)
            raise objects.document.error(path, says)
        settings[key] = value


def _refuse_another_schedule(objects: RecipeObjects, training: Mapping[str, Any]) -> None:
    for key in ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"):
        if key in training:
            says = "must be left out where there is a section `lr_schedule`"
            raise objects.document.error(("training", key), says)


def _max_grad_norm(
    objects: RecipeObjects, training: Mapping[str, Any], wrapper: RunnerWrapperSection
) -> float:
    """Return the limit; 0 lets the Trainer report the norm and not clip."""
    given = training.get("max_grad_norm")
    if wrapper.max_grad_norm is not None and given not in (None, wrapper.max_grad_norm):
        says = f"must be that of `runner_wrapper`, {wrapper.max_grad_norm}, got {given}"
        raise objects.document.error(("training", "max_grad_norm"), says)
    clips = given is not None if wrapper.use_clip_grad is None else wrapper.use_clip_grad
    if not clips:
        if given:
            says = f"must be 0 or left out with `runner_wrapper.use_clip_grad` False, got {given}"
            raise objects.document.error(("training", "max_grad_norm"), says)
        return 0.0
    limit = wrapper.max_grad_norm if wrapper.max_grad_norm is not None else given
    return 1.0 if limit is None else float(limit)
