"""The arguments of a recipe's training, with its schedule and adapter."""

import functools
import inspect
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainingArguments

from mfwrap.collectives import leave_shared_store, refuse_lone_process
from mfwrap.recipe.document import Path, shown
from mfwrap.recipe.objects import RecipeObjects
from mfwrap.recipe.sections import (
    OPTIMIZER_KEYS_WITHOUT_MEANING,
    OPTIMIZERS,
    SCHEDULE_ALIASES,
    RunnerWrapperSection,
)
from mfwrap.schedules import SCHEDULES
from mfwrap.schedules.formula import FormulaLR, WarmUp


class TrainingChoice(NamedTuple):
    """Training arguments and schedule of a recipe."""

    arguments: TrainingArguments
    schedule: "ScheduleChoice | None"
    """MindFormers' schedule; ``None`` for the schedule named in `arguments`."""


@final
@dataclass(frozen=True)
class ScheduleChoice:
    """Class and settings of a schedule, which can be built once the optimizer exists."""

    kind: type[FormulaLR]
    """Class of the schedule."""

    settings: Mapping[str, Any]
    """Arguments of the class, without the optimizer and ``total_steps``."""

    total_steps: int | None
    """Length that the recipe sets; ``None`` for the length of the training."""

    def make(self, optimizer: Optimizer, num_training_steps: int) -> LRScheduler:
        """Build the schedule for an optimizer."""
        settings = dict(self.settings)
        if _has_length(self.kind):
            settings["total_steps"] = self.total_steps or num_training_steps
        return self.kind(optimizer, **settings)


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
        objects: Builder for the recipe.
        kind: ``TrainingArguments``, or the task's subclass of it.
        name: Name of the recipe, used for the run folder if ``output_dir`` is not set.
        training: Section ``training``.
        wrapper: Section ``runner_wrapper``.
        optimizer: Section ``optimizer``.
        lr_schedule: Section ``lr_schedule``.

    Raises:
        ConnectionError: If this process cannot join the other ranks.
        RecipeError: If a setting is unknown, out of range, or set in two sections to different
            values, or if a launcher started several processes but this one would train alone.
    """
    known = {field.name for field in fields(kind) if field.init}
    settings = objects.kept(("training",), training, known)
    for key, value in settings.items():
        objects.check_type(("training", key), kind, key, value)
        _check_range(objects, ("training", key), key, value)
    settings.setdefault("output_dir", f"runs/{name}")
    objects.check_folder(("training", "output_dir"), settings["output_dir"])
    if not torch.accelerator.is_available():
        # Change three defaults on a CPU. Without `use_cpu`, accelerate would not connect several
        # processes: each would train alone. torch would warn about pinned memory, and TRL would
        # train in bf16, which is meant for accelerators.
        settings = {"use_cpu": True, "dataloader_pin_memory": False, "bf16": False} | settings
    if optimizer is not None:
        _merge(objects, settings, _optimizer_arguments(objects, optimizer), "optimizer")
    schedule = None
    if lr_schedule is not None:
        for key in ("lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"):
            if key in training:
                says = "must be left out, because the recipe has a section lr_schedule"
                raise objects.document.error(("training", key), says)
        max_steps = settings.get("max_steps", -1)
        schedule, rate = read_schedule(objects, ("lr_schedule",), lr_schedule, max_steps)
        if rate is not None:
            _merge(objects, settings, {"learning_rate": rate}, "lr_schedule")
    if wrapper is not None:
        settings["max_grad_norm"] = _max_grad_norm(objects, training, wrapper)
    leave_shared_store()
    arguments = objects.build(("training",), kind, settings, known=known)
    try:
        refuse_lone_process(
            arguments.world_size,
            "leave `training.use_cpu` out, and use a launcher that sets LOCAL_RANK",
        )
    except ValueError as error:
        raise objects.document.error(("training",), str(error)) from error
    return TrainingChoice(arguments, schedule)


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


def _check_range(objects: RecipeObjects, path: Path, key: str, value: Any) -> None:
    """Check a number.

    Args:
        objects: Builder for the recipe.
        path: Path of the number.
        key: Field of ``TrainingArguments`` that gets the number.
        value: The number. A value that is not a number is accepted.
    """
    if not _is_number(value):
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


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


_OPTIMIZER_ARGUMENTS: Mapping[str, str] = {
    "beta1": "adam_beta1",
    "beta2": "adam_beta2",
    "eps": "adam_epsilon",
    "learning_rate": "learning_rate",
    "weight_decay": "weight_decay",
}
"""Field of ``TrainingArguments`` for each key of the section ``optimizer``."""


def _optimizer_arguments(objects: RecipeObjects, section: Mapping[str, Any]) -> dict[str, Any]:
    name, settings = objects.named_type(("optimizer",), section, OPTIMIZERS)
    known = {"betas", *_OPTIMIZER_ARGUMENTS}
    settings = objects.kept(("optimizer",), settings, known, OPTIMIZER_KEYS_WITHOUT_MEANING)
    betas = settings.pop("betas", None)
    if betas is not None:
        if not isinstance(betas, list) or len(betas) != 2:
            says = f"expected a list of two numbers, got {betas!r}"
            raise objects.document.error(("optimizer", "betas"), says)
        settings |= {"beta1": betas[0], "beta2": betas[1]}
    arguments: dict[str, Any] = {"optim": OPTIMIZERS[name]}
    for key, value in settings.items():
        at = "betas" if betas is not None and key.startswith("beta") else key
        if not _is_number(value) or not value >= 0:
            says = f"expected a number >= 0, got {value!r}"
            raise objects.document.error(("optimizer", at), says)
        field = _OPTIMIZER_ARGUMENTS[key]
        _check_range(objects, ("optimizer", at), field, value)
        arguments[field] = value
    return arguments


def _merge(
    objects: RecipeObjects, settings: dict[str, Any], others: Mapping[str, Any], section: str
) -> None:
    """Add another section's settings to `settings`; raise `RecipeError` if two values differ."""
    for key, value in others.items():
        if key in settings and settings[key] != value:
            path = ("training", key)
            if path not in objects.document.places:
                path = ("optimizer", key)  # an earlier call merged `optimizer` into `settings`
            says = f"expected {value!r} as in {section}, or no value, got {settings[key]!r}"
            raise objects.document.error(path, says)
        settings[key] = value


def _max_grad_norm(
    objects: RecipeObjects, training: Mapping[str, Any], wrapper: RunnerWrapperSection
) -> float:
    """Return the Trainer's ``max_grad_norm``; with 0 the norm is reported but not clipped."""
    path = ("training", "max_grad_norm")
    limit = training.get("max_grad_norm")
    if wrapper.max_grad_norm is not None and limit not in (None, wrapper.max_grad_norm):
        says = f"expected {wrapper.max_grad_norm} as in runner_wrapper, got {limit}"
        raise objects.document.error(path, says)
    clips = limit is not None if wrapper.use_clip_grad is None else wrapper.use_clip_grad
    if clips:
        limits = (wrapper.max_grad_norm, limit, 1.0)
        return float(next(each for each in limits if each is not None))
    if limit:
        says = f"expected 0 because runner_wrapper.use_clip_grad is false, got {limit}"
        raise objects.document.error(path, says)
    return 0.0


_RATE_KEYS = ("learning_rate", "base_lr")
_ANY_LENGTH = 10**9


def read_schedule(
    objects: RecipeObjects, path: Path, section: Mapping[str, Any], max_steps: int
) -> tuple[ScheduleChoice, float | None]:
    """Return the schedule of a section ``lr_schedule``, and the learning rate that it sets.

    Args:
        objects: Builder for the recipe. It builds the schedule once, to check the settings.
        path: Path of the section.
        section: Content of the section.
        max_steps: Number of steps of the training; <= 0 if it depends on the data.

    Raises:
        RecipeError: If the schedule or a setting is unknown, or a value is out of range.
    """
    name, settings = objects.named_type(path, section, {*SCHEDULES, *SCHEDULE_ALIASES})
    kind = SCHEDULES[SCHEDULE_ALIASES.get(name, name)]
    total_steps = settings.pop("total_steps", None)
    if total_steps == -1:  # In MindFormers, -1 means the length of the training
        total_steps = None
    rates = [settings.pop(key) for key in _RATE_KEYS if key in settings]
    rate = rates[0] if rates else None
    if rate is not None:
        rate_key = next(key for key in _RATE_KEYS if key in section)
        if not _is_number(rate):
            says = f"expected a number, got {shown(rate)}"
            raise objects.document.error((*path, rate_key), says)
        _check_range(objects, (*path, rate_key), "learning_rate", rate)
    probe = torch.optim.SGD([torch.zeros(1)], lr=rate or 1.0)
    length = total_steps or (max_steps if max_steps > 0 else _ANY_LENGTH)
    checked = settings | ({"total_steps": length} if _has_length(kind) else {})
    objects.build(path, functools.partial(kind, probe), checked, known=_keys_of(kind))
    return ScheduleChoice(kind, settings, total_steps), rate


def _has_length(kind: type[FormulaLR]) -> bool:
    return "total_steps" in inspect.signature(kind).parameters


def _keys_of(kind: type[FormulaLR]) -> set[str]:
    """Return the keys that a schedule's section may have: its arguments and the learning rate."""
    parameters = inspect.signature(kind).parameters
    has_warm_up = "warm_up" in parameters
    rate_keys = {"learning_rate", *WarmUp.__annotations__} if has_warm_up else {"base_lr"}
    return (parameters.keys() | rate_keys) - {"optimizer", "last_epoch", "warm_up"}


def scheduled(trainer: type[Any], choice: ScheduleChoice | None) -> type[Any]:
    """Return a subclass of a Trainer that uses a recipe's schedule.

    If the recipe has no schedule, the Trainer itself is returned.
    """
    if choice is None:
        return trainer

    def create_scheduler(
        self: Any, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> Any:
        """Build the recipe's schedule; the Trainer's own method then keeps and prepares it."""
        if self.lr_scheduler is None:
            self.lr_scheduler = choice.make(
                self.optimizer if optimizer is None else optimizer, num_training_steps
            )
        return trainer.create_scheduler(self, num_training_steps, optimizer)

    return type(trainer.__name__, (trainer,), {"create_scheduler": create_scheduler})


def read_peft(
    objects: RecipeObjects, section: Mapping[str, Any] | None, task_type: str | None
) -> Any:
    """Return PEFT's configuration of a section ``peft``; ``None`` without the section.

    Args:
        objects: Builder for the recipe.
        section: ``type`` and arguments of PEFT's configuration.
        task_type: PEFT's name of the task; ``None`` if PEFT has none.

    Raises:
        RecipeError: If the adapter or a key is unknown, or PEFT is not installed.
    """
    if section is None:
        return None
    try:
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING  # noqa: PLC0415  (slow; part of an extra)
    except ImportError as error:
        says = 'needs PEFT; install it with pip install "mfwrap[recipes]"'
        raise objects.document.error(("peft",), says) from error
    settings = dict(section)
    kinds = {
        str(kind.value).lower(): config for kind, config in PEFT_TYPE_TO_CONFIG_MAPPING.items()
    }
    name = objects.choice(("peft", "type"), settings.pop("type", "lora"), kinds)
    if task_type is not None:
        settings.setdefault("task_type", task_type)
    return objects.build(("peft",), kinds[name], settings)
