"""Convert the learning rates of a MindFormers file: their schedules, groups and scaling."""

import math
from collections.abc import Mapping
from typing import Any

from mfwrap.runner.document import Path, shown
from mfwrap.runner.mindformers.rate_groups import (
    MODEL_TYPES,
    converted_patterns,
    parameter_names,
)
from mfwrap.runner.mindformers.source import SourceFile
from mfwrap.runner.mindformers.training import Layout
from mfwrap.runner.objects import RecipeObjects
from mfwrap.runner.ranges import is_number
from mfwrap.runner.schedules import keys_of
from mfwrap.runner.sections import SCHEDULE_ALIASES, GroupedSection
from mfwrap.schedules.names import SCHEDULES

_WITHOUT_LENGTH = frozenset(
    {"ConstantWarmUpLR", "CosineAnnealingLR", "CosineAnnealingWarmRestarts"}
)
"""Schedules that do not depend on the length of the training, unless a share of it is set."""

_KEYS = {key for each in SCHEDULES.values() for key in keys_of(each)} - {
    "base_lr",
    "learning_rate",
    "total_steps",
}
"""Keys of all schedules that are no rate and no length."""


def take_schedules(
    source: SourceFile,
    training: Mapping[str, Any],
    layout: Layout,
    config: Mapping[str, Any],
    task: str,
    *,
    is_adapted: bool,
) -> dict[str, Any]:
    """Return the section ``lr_schedule`` or ``grouped_lr_schedule``, by its name.

    Source: MindFormers, ``BaseTrainer.create_optimizer_scheduler``.

    Args:
        source: File, whose sections are taken, its keys that scale learning rates, and the
            optimizer's ``learning_rate``, which MindFormers uses only without a schedule.
        training: Section ``training`` of the recipe.
        layout: How the batch of an update is divided.
        config: Section ``model.config`` of the recipe; empty if the model is loaded.
        task: Task of the recipe.
        is_adapted: Whether the recipe trains an adapter.

    Raises:
        RecipeError: If the file has neither a schedule nor a learning rate, a section is not a
            mapping, or the rates depend on a number that the file does not say.
    """
    factor = _scale(source, training, layout)
    grouped = source.mapping("grouped_lr_schedule")
    if grouped:
        source.ignore("lr_schedule")
        source.ignore("optimizer", "learning_rate")
        sections = _grouped(source, grouped, config, task, is_adapted=is_adapted)
    else:
        sections = {"lr_schedule": _schedule(source)}
    for path, schedule in _schedules(sections):
        _convert(source, path, schedule, training, factor)
    return sections


def _schedule(source: SourceFile) -> dict[str, Any]:
    """Return the section ``lr_schedule``, or a constant schedule with the optimizer's rate."""
    if schedule := source.mapping("lr_schedule"):
        source.ignore("optimizer", "learning_rate")
        return schedule
    rate = source.take("optimizer", "learning_rate")
    if rate is None:
        says = "required, because the file has no optimizer.learning_rate, either"
        raise source.document.error(("lr_schedule",), f"{says}; add the section to the file")
    return {"type": "ConstantWarmUpLR", "learning_rate": rate, "warmup_steps": 0}


def _grouped(
    source: SourceFile,
    section: Mapping[str, Any],
    config: Mapping[str, Any],
    task: str,
    *,
    is_adapted: bool,
) -> dict[str, Any]:
    """Return schedules for groups of parameters, or the default schedule and a loss."""
    place: Path = ("grouped_lr_schedule",)
    section = {**section, "grouped": section.get("grouped") or []}
    content = RecipeObjects(source.document).parse(place, GroupedSection, section)
    default, grouped = content.default, content.grouped
    for number, schedule in enumerate(grouped):
        names = schedule.get("params")
        if not isinstance(names, list) or not names or not all(isinstance(n, str) for n in names):
            says = f"expected a schedule with params, a list of names, got {shown(schedule)}"
            raise source.document.error((*place, "grouped", number), says)
    if not grouped:
        return {"lr_schedule": default}
    patterns = None
    if config.get("model_type") in MODEL_TYPES and not is_adapted:
        names = parameter_names(config, task)
        patterns = converted_patterns(names, [schedule["params"] for schedule in grouped])
    if patterns is None:
        says = "mfwrap cannot convert the names of MindFormers' parameters in the groups"
        source.lose("lr_groups", (*place, "grouped"), f"{says}; the recipe has the default for all")
        return {"lr_schedule": default}
    groups = [
        schedule | {"params": names} for schedule, names in zip(grouped, patterns, strict=True)
    ]
    return {"grouped_lr_schedule": {"default": default, "grouped": groups}}


def _schedules(sections: Mapping[str, Any]) -> list[tuple[Path, dict[str, Any]]]:
    """Return each schedule with its place."""
    if "lr_schedule" in sections:
        return [(("lr_schedule",), sections["lr_schedule"])]
    place = ("grouped_lr_schedule",)
    grouped = sections["grouped_lr_schedule"]
    return [
        ((*place, "default"), grouped["default"]),
        *(((*place, "grouped", number), each) for number, each in enumerate(grouped["grouped"])),
    ]


def _convert(
    source: SourceFile,
    path: Path,
    schedule: dict[str, Any],
    training: Mapping[str, Any],
    factor: float | None,
) -> None:
    """Convert a schedule in place."""
    has_length = schedule.get("total_steps") not in (None, -1)
    epochs = schedule.pop("warmup_epochs", None)
    if epochs is not None and schedule.get("warmup_ratio") is None:
        if has_length:
            says = "expected warmup_steps, because total_steps says nothing about an epoch's length"
            raise source.document.error((*path, "warmup_epochs"), says)
        schedule |= _warm_up(source, (*path, "warmup_epochs"), epochs, training)
    kind = SCHEDULE_ALIASES.get(str(schedule.get("type")), str(schedule.get("type")))
    ignore_keys_of_others(source, path, kind, schedule)
    needs_length = kind not in _WITHOUT_LENGTH or schedule.get("warmup_ratio") is not None
    if "max_steps" in training and needs_length and not has_length:
        says = (
            "required with runner_config.stop_step, because MindFormers' schedule then has the "
            "length of all epochs"
        )
        raise source.document.error((*path, "total_steps"), says)
    if factor is not None:
        rate = schedule.get("learning_rate")
        if not isinstance(rate, (int, float)):
            says = f"expected a number to scale, because lr_scale is true, got {shown(rate)}"
            raise source.document.error((*path, "learning_rate"), says)
        schedule["learning_rate"] = rate * factor


def ignore_keys_of_others(
    source: SourceFile, path: Path, kind: str, schedule: dict[str, Any]
) -> None:
    """Drop the keys that only other schedules have: MindFormers takes them, and reads none."""
    if kind in SCHEDULES:
        for key in sorted(schedule.keys() & _KEYS - keys_of(SCHEDULES[kind])):
            del schedule[key]
            source.without_effect.append(".".join(map(str, (*path, key))))


def _warm_up(
    source: SourceFile, path: Path, warm_up: Any, training: Mapping[str, Any]
) -> dict[str, Any]:
    """Return ``warmup_ratio`` for a number of epochs, which sets the same number of steps."""
    epochs = training.get("num_train_epochs")
    if not is_number(warm_up) or not isinstance(epochs, int) or not 0 <= warm_up <= epochs:
        says = f"expected a number of epochs in [0, {shown(epochs)}], got {shown(warm_up)}"
        raise source.document.error(path, says)
    ratio = warm_up / epochs
    # The schedule rounds down. If floating point had rounded the ratio down, a step would be lost.
    return {"warmup_ratio": min(1.0, math.nextafter(ratio, 1.0))}


def _scale(source: SourceFile, training: Mapping[str, Any], layout: Layout) -> float | None:
    """Return the factor of all learning rates that ``lr_scale`` asks for; ``None`` for none."""
    unit = source.number("lr_scale_factor", default=256)
    if not source.flag("lr_scale"):
        return None
    size = training.get("per_device_train_batch_size")
    if layout.is_automatic or not size or unit <= 0:
        says = "expected false; set lr_schedule.learning_rate to the scaled learning rate"
        raise source.document.error(("lr_scale",), f"{says}, got true")
    says = f"scaled for {layout.processes} x {size} rows, as lr_scale asks"
    source.notes.append(f"lr_schedule.learning_rate: {says}")
    return float(layout.processes * size / unit)
