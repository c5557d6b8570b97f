"""MindFormers' schedules behind a Trainer, which learns the number of updates when it trains."""

import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mfwrap.recipe.document import Path
from mfwrap.recipe.objects import RecipeObjects
from mfwrap.recipe.sections import SCHEDULE_ALIASES
from mfwrap.schedules.formula import FormulaLR, WarmUp
from mfwrap.schedules.names import SCHEDULES

__all__ = ["ScheduleChoice", "read_schedule", "scheduled"]

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
