"""The arguments of a recipe's training, from its own section and from MindFormers' sections."""

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import TrainingArguments

from mfwrap.recipe.document import Path
from mfwrap.recipe.objects import RecipeObjects
from mfwrap.recipe.sections import (
    OPTIMIZER_KEYS_WITHOUT_MEANING,
    OPTIMIZERS,
    SCHEDULE_ALIASES,
    RunnerWrapperSection,
)
from mfwrap.schedules.formula import FormulaLR, WarmUp
from mfwrap.schedules.names import SCHEDULES

__all__ = [
    "ScheduleChoice",
    "TrainingChoice",
    "read_peft",
    "read_training",
    "scheduled",
]


_RATE_KEYS = ("learning_rate", "base_lr")
_ANY_LENGTH = 10**9


@final
@dataclass(frozen=True)
class ScheduleChoice:
    """A schedule that is made once the optimizer is there.

    Args:
        kind: Class of `mfwrap.schedules`.
        settings: Its arguments, but for optimizer and length.
        total_steps: Length that the recipe gives; ``None`` for that of the training.
    """

    kind: Any
    settings: Mapping[str, Any]
    total_steps: int | None

    def make(self, optimizer: Optimizer, num_training_steps: int) -> LRScheduler:
        """Return the schedule of an optimizer."""
        settings = dict(self.settings)
        if "total_steps" in inspect.signature(self.kind).parameters:
            settings["total_steps"] = self.total_steps or num_training_steps
        schedule: LRScheduler = self.kind(optimizer, **settings)
        return schedule


def read_schedule(
    objects: RecipeObjects, path: Path, section: Mapping[str, Any], max_steps: int
) -> tuple[ScheduleChoice, float | None]:
    """Return the schedule of a section ``lr_schedule``, and the learning rate that it gives.

    Args:
        objects: Builds it once, to see whether it can be.
        path: Where the section stands.
        section: What it says.
        max_steps: Length of the training; not positive if that depends on the data.

    Raises:
        RecipeError: If it is no schedule.
    """
    settings = dict(section)
    kind = _kind(objects, (*path, "type"), settings.pop("type", None))
    total_steps = settings.pop("total_steps", None)
    if total_steps == -1:  # MindFormers: the length of the training
        total_steps = None
    rates = [settings.pop(key) for key in _RATE_KEYS if key in settings]
    rate = rates[0] if rates else None
    if rate is not None and (isinstance(rate, bool) or not isinstance(rate, (int, float))):
        says = f"must be a number, got {rate!r}"
        raise objects.document.error((*path, "learning_rate"), says)
    probe = torch.optim.SGD([torch.zeros(1)], lr=rate or 1.0)
    length = total_steps or (max_steps if max_steps > 0 else _ANY_LENGTH)
    checked = dict(settings)
    if "total_steps" in inspect.signature(kind).parameters:
        checked["total_steps"] = length
    objects.build(path, functools.partial(kind, probe), checked, known=_settings_of(kind))
    return ScheduleChoice(kind, settings, total_steps), rate


def _kind(objects: RecipeObjects, path: Path, name: object) -> type[FormulaLR]:
    """Return the class of a schedule that is named, or called by MindFormers' other name of it."""
    known = [*SCHEDULES, *SCHEDULE_ALIASES]
    if not isinstance(name, str) or name not in known:
        raise objects.document.error(path, f"must be one of {sorted(known)}, got {name!r}")
    return SCHEDULES[SCHEDULE_ALIASES.get(name, name)]


def _settings_of(kind: type[FormulaLR]) -> set[str]:
    """Return the keys of a schedule: its arguments, and a rate in the place of the optimizer."""
    parameters = inspect.signature(kind).parameters
    has_warm_up = any(one.kind is one.VAR_KEYWORD for one in parameters.values())
    names = {name for name, one in parameters.items() if one.kind is not one.VAR_KEYWORD}
    names |= {"learning_rate", *WarmUp.__annotations__} if has_warm_up else {"base_lr"}
    return names - {"optimizer", "last_epoch"}


def scheduled(trainer: type[Any], choice: ScheduleChoice | None) -> type[Any]:
    """Return a Trainer's class with a schedule in the place of its own, if there is one."""
    if choice is None:
        return trainer

    def create_scheduler(
        self: Any, num_training_steps: int, optimizer: Optimizer | None = None
    ) -> Any:
        """Make the recipe's schedule, and let the Trainer take it over."""
        if self.lr_scheduler is None:
            self.lr_scheduler = choice.make(
                self.optimizer if optimizer is None else optimizer, num_training_steps
            )
        return trainer.create_scheduler(self, num_training_steps, optimizer)

    return type(trainer.__name__, (trainer,), {"create_scheduler": create_scheduler})


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


_TASK_TYPES = {
    "causal_lm": "CAUSAL_LM",
    "preference_tuning": "CAUSAL_LM",
    "sequence_classification": "SEQ_CLS",
    "supervised_tuning": "CAUSAL_LM",
    "token_classification": "TOKEN_CLS",
}
"""What PEFT calls the tasks that it knows."""


def read_peft(objects: RecipeObjects, section: Mapping[str, Any] | None, task: str) -> Any:
    """Return PEFT's configuration of a section ``peft``; ``None`` without one.

    Args:
        objects: Builds it.
        section: ``type`` and arguments.
        task: Name of the task.

    Raises:
        RecipeError: If it is no adapter, or PEFT is not installed.
    """
    if section is None:
        return None
    try:
        # Takes seconds to import, and is of an extra.
        from peft import PEFT_TYPE_TO_CONFIG_MAPPING  # noqa: PLC0415
    except ImportError as error:
        says = 'needs PEFT; pip install "mfwrap[recipes]"'
        raise objects.document.error(("peft",), says) from error
    settings = dict(section)
    kinds = {str(kind.value).lower(): one for kind, one in PEFT_TYPE_TO_CONFIG_MAPPING.items()}
    name = settings.pop("type", "lora")
    if not isinstance(name, str) or name not in kinds:
        says = f"must be one of {sorted(kinds)}, got {name!r}"
        raise objects.document.error(("peft", "type"), says)
    if task in _TASK_TYPES:
        settings.setdefault("task_type", _TASK_TYPES[task])
    return objects.build(("peft",), kinds[name], settings)
