"""The sections ``lr_schedule`` and ``grouped_lr_schedule`` of a recipe."""

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mfwrap.runner.document import Path, shown
from mfwrap.runner.layer_decay import SCALE
from mfwrap.runner.objects import RecipeObjects, taken
from mfwrap.runner.own_code import OwnKind, OwnType
from mfwrap.runner.parameter_groups import DEFAULT_GROUP, RateGroup
from mfwrap.runner.ranges import check_range, is_number
from mfwrap.runner.sections import SCHEDULE_ALIASES, GroupedSection
from mfwrap.schedules import SCHEDULES, GroupedLR
from mfwrap.schedules.formula import FormulaLR, WarmUp


@final
@dataclass(frozen=True)
class ScheduleChoice:
    """Class and settings of a schedule, which can be built once the optimizer exists."""

    kind: Callable[..., LRScheduler]
    """Class of the schedule, or a function that builds it."""

    settings: Mapping[str, Any]
    """Arguments of `kind`, without the optimizer and the length."""

    total_steps: int | None
    """Length that the recipe sets; ``None`` for the length of the training."""

    @property
    def has_formula(self) -> bool:
        """Whether the schedule is MindFormers', or derives from its class."""
        return isinstance(self.kind, type) and issubclass(self.kind, FormulaLR)

    def make(self, optimizer: Optimizer, num_training_steps: int) -> LRScheduler:
        """Build the schedule for an optimizer."""
        length = self.total_steps or num_training_steps
        return self.kind(optimizer, **self.settings, **_lengths(self.kind, length))

    def scaled(self, factor: float) -> "ScheduleChoice":
        """Return a schedule with `factor` times this one's rates, if the initial rate has it too.

        All formulas are linear in the initial rate and the rates among the settings together.
        """
        defaults = inspect.signature(self.kind).parameters
        rates = {key: each.default for key, each in defaults.items() if key in _END_RATES}
        rates |= {key: value for key, value in self.settings.items() if key in _END_RATES}
        scaled = {key: rate * factor for key, rate in rates.items() if rate is not None}
        return dataclasses.replace(self, settings={**self.settings, **scaled})


_LENGTHS = ("total_steps", "num_training_steps")
"""Arguments of schedules that are the number of steps."""

_OWN = OwnKind(
    "a subclass of torch.optim.lr_scheduler.LRScheduler, or a function of the optimizer that "
    "builds one",
    lambda found: issubclass(found, LRScheduler) if isinstance(found, type) else callable(found),
)

_END_RATES = frozenset({"eta_min", "lr_end", "lr_end1", "lr_end2", "warmup_lr_init"})
"""Keys of schedules that are learning rates, apart from the initial one."""

_RATE_KEYS = ("learning_rate", "base_lr")
_ANY_LENGTH = 10**9


@final
@dataclass(frozen=True)
class GroupedScheduleChoice:
    """Schedules by the names of parameter groups, or one schedule scaled for each layer."""

    schedules: Mapping[str, ScheduleChoice]
    """Schedule of each group, by the group's entry ``name``. The groups of
    `LayerDecaySection.groups` share the schedule ``default``."""

    def make(self, optimizer: Optimizer, num_training_steps: int) -> LRScheduler:
        """Build the schedule for an optimizer whose parameter groups have names."""
        default = self.schedules[DEFAULT_GROUP]
        chosen = [
            default.scaled(group[SCALE]) if SCALE in group else self.schedules[group["name"]]
            for group in optimizer.param_groups
        ]
        makes: list[Any] = [
            functools.partial(each.make, num_training_steps=num_training_steps) for each in chosen
        ]
        return GroupedLR(optimizer, makes)


Schedule = ScheduleChoice | GroupedScheduleChoice
"""MindFormers' schedule of a recipe."""

_OWN_OF_GROUP = OwnKind(
    "a subclass of mfwrap.schedules.formula.FormulaLR, because each group has its own schedule",
    lambda found: isinstance(found, type) and issubclass(found, FormulaLR),
)


def read_schedule(
    objects: RecipeObjects,
    path: Path,
    section: Mapping[str, Any],
    max_steps: int,
    own_kind: OwnKind = _OWN,
) -> tuple[ScheduleChoice | None, float | None]:
    """Return the schedule of a section ``lr_schedule``, and the learning rate that it sets.

    There is no schedule if it is a class of the user's own, and the recipe may not run code.

    Args:
        objects: Builder for the recipe. It builds the schedule once, to check the settings.
        path: Path of the section.
        section: Content of the section.
        max_steps: Number of steps of the training; <= 0 if it depends on the data.
        own_kind: What a class of the user's own must be.

    Raises:
        RecipeError: If the schedule or a setting is unknown, or a value is out of range.
    """
    if (own := objects.own_type(path, section, own_kind)) is not None:
        return _read_own(objects, path, own, max_steps)
    name, settings = objects.named_type(path, section, {*SCHEDULES, *SCHEDULE_ALIASES})
    kind = SCHEDULES[SCHEDULE_ALIASES.get(name, name)]
    total_steps = settings.pop("total_steps", None)
    if total_steps == -1:  # In MindFormers, -1 means the length of the training
        total_steps = None
    rate = _taken_rate(objects, path, settings, _RATE_KEYS)
    probe = torch.optim.SGD([torch.zeros(1)], lr=rate or 1.0)
    checked = settings | _lengths(kind, total_steps or _length(max_steps))
    objects.build(path, functools.partial(kind, probe), checked, known=keys_of(kind))
    return ScheduleChoice(kind, settings, total_steps), rate


def _read_own(
    objects: RecipeObjects, path: Path, own: OwnType, max_steps: int
) -> tuple[ScheduleChoice | None, float | None]:
    """Return a schedule of the user's own, and the learning rate; see `read_schedule`."""
    if own.found is None:
        return None, None
    settings = dict(own.settings)
    rate = _taken_rate(objects, path, settings, ("learning_rate",))
    settings = objects.checked_arguments(path, own.found, settings, num_passed=1, implied=_LENGTHS)
    total_steps = [settings.pop(key) for key in _LENGTHS if key in settings]
    length = next((one for one in total_steps if one not in {None, -1}), None)
    choice = ScheduleChoice(own.found, settings, length)
    probe = torch.optim.SGD([torch.zeros(1)], lr=rate or 1.0)
    made = objects.call(path, functools.partial(choice.make, probe, _length(max_steps)))
    if not isinstance(made, LRScheduler):
        says = f"expected {_OWN.says}, but {own.name} built a {type(made).__name__}"
        raise objects.document.error((*path, "type"), says)
    return choice, rate


def _taken_rate(
    objects: RecipeObjects, path: Path, settings: dict[str, Any], keys: Sequence[str]
) -> float | None:
    """Take the learning rate out of the settings of a schedule."""
    rates = {key: settings.pop(key) for key in keys if key in settings}
    rate = next(iter(rates.values()), None)
    if rate is not None:
        rate_key = next(iter(rates))
        if not is_number(rate):
            says = f"expected a number, got {shown(rate)}"
            raise objects.document.error((*path, rate_key), says)
        check_range(objects, (*path, rate_key), "learning_rate", rate)
    return rate


def _length(max_steps: int) -> int:
    return max_steps if max_steps > 0 else _ANY_LENGTH


def _lengths(kind: Callable[..., Any], length: int) -> dict[str, int]:
    """Return the arguments of a schedule that are its length."""
    return dict.fromkeys(taken(kind, _LENGTHS), length)


def keys_of(kind: type[FormulaLR]) -> set[str]:
    """Return the keys that a schedule's section may have: its arguments and the learning rate."""
    parameters = inspect.signature(kind).parameters
    has_warm_up = "warm_up" in parameters
    rate_keys = {"learning_rate", *WarmUp.__annotations__} if has_warm_up else {"base_lr"}
    return (parameters.keys() | rate_keys) - {"optimizer", "last_epoch", "warm_up"}


def read_grouped_schedule(
    objects: RecipeObjects, section: Mapping[str, Any], max_steps: int
) -> tuple[GroupedScheduleChoice, float | None, tuple[RateGroup, ...]]:
    """Read the section ``grouped_lr_schedule``.

    Args:
        objects: Builder for the recipe.
        section: Content of the section.
        max_steps: Number of steps of the training; <= 0 if it depends on the data.

    Returns:
        The schedules; the learning rate of the default group, ``None`` if the section does not set
        it; and the other groups.

    Raises:
        RecipeError: If a key or a schedule is unknown or missing, or a value is out of range.
    """
    path = ("grouped_lr_schedule",)
    content = objects.parse(path, GroupedSection, section)
    at_default = (*path, "default")
    default, rate = read_schedule(objects, at_default, content.default, max_steps, _OWN_OF_GROUP)
    schedules = {} if default is None else {DEFAULT_GROUP: default}
    rate_groups: list[RateGroup] = []
    for number, settings in enumerate(content.grouped):
        at = (*path, "grouped", number)
        patterns = settings.get("params")
        is_list = isinstance(patterns, list) and all(isinstance(p, str) and p for p in patterns)
        if not is_list or not patterns:
            says = f"expected a list of parts of parameters' names, got {shown(patterns)}"
            raise objects.document.error((*at, "params"), says)
        others = {key: value for key, value in settings.items() if key != "params"}
        choice, own_rate = read_schedule(objects, at, others, max_steps, _OWN_OF_GROUP)
        group = RateGroup((*at, "params"), tuple(patterns), own_rate)
        if group.name in {DEFAULT_GROUP, *(one.name for one in rate_groups)}:
            says = f"expected other patterns than those of an earlier group, got {patterns}"
            raise objects.document.error((*at, "params"), says)
        if choice is not None:
            schedules[group.name] = choice
        rate_groups.append(group)
    return GroupedScheduleChoice(schedules), rate, tuple(rate_groups)
