"""Give the optimizer of a resumed training the settings that have changed since its checkpoint.

A stock Trainer loads the settings of the checkpoint over them: a learning rate or a weight decay
that is set for the resume has no effect, in silence. If the schedule has another length, its first
update has the rate of the former schedule, which is 0 for a training that had ended.
"""

import inspect
import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from torch.optim.lr_scheduler import LambdaLR

from mfwrap.collectives import this_rank
from mfwrap.compatibility.torch import formula_rates, set_last_rate
from mfwrap.schedules.formula import FormulaLR
from mfwrap.schedules.grouped import GroupedLR
from mfwrap.tensors.wrappers import unwrapped_optimizer

_LOG = logging.getLogger(__name__)

_RATE = "initial_lr"
"""Learning rate that a schedule multiplies; ``lr`` is that of the next update."""

_TAKEN = frozenset({_RATE, "max_lr", "min_lr", "weight_decay", "betas", "eps"})
"""Options that may change on the way. Another momentum, for example, needs another state."""

_BY_FORMULA = (LambdaLR, FormulaLR, GroupedLR)
"""Schedules that compute each rate from the initial rate and the number of updates."""

_PROGRESS = ("base_lrs", "last_epoch")
"""What the state of a schedule has beside its settings, and beside private names."""

_ROUNDING = 1e-6
"""Largest relative difference of equal rates, one of which may be a float32."""

_Setting = float | int | tuple[float | int, ...]


@final
class OptimizerSettings:
    """Settings with which the optimizer of a training was made: options of its parameter groups.

    Options that a schedule changes as the training goes on, such as the momentum of ``OneCycleLR``,
    are compared as they were at the start, so they are no changed settings.
    """

    def __init__(self) -> None:
        self._of: weakref.ref[Any] | None = None
        self._groups: list[dict[str, _Setting]] = []

    def note(self, optimizer: Any) -> None:
        """Note the settings of an optimizer whose schedule is made and that has loaded nothing.

        Args:
            optimizer: The optimizer, with or without accelerate's wrapper. One that was noted
                before may have other options by now, so its settings are kept.
        """
        inner = unwrapped_optimizer(optimizer)
        if self._of is None or self._of() is not inner:
            self._of = weakref.ref(inner)
            self._groups = [_numbers(group) for group in getattr(inner, "param_groups", ())]

    def apply(
        self,
        optimizer: Any,
        schedule: "ContinuedSchedule",
        saved: Sequence[Mapping[str, Any]] | None,
    ) -> None:
        """Set what differs from the checkpoint that optimizer and schedule have loaded.

        Args:
            optimizer: The optimizer.
            schedule: Its schedule.
            saved: What `state_dict` returned for the checkpoint; ``None`` if it was not written by
                an `MFTrainer`. Then only the learning rates are compared.
        """
        groups = getattr(unwrapped_optimizer(optimizer), "param_groups", ())
        if saved is None:
            saved = [{_RATE: group[_RATE]} for group in map(_numbers, groups) if _RATE in group]
        if not len(groups) == len(saved) == len(self._groups):
            return
        rates = _rates_of(schedule.inner)
        taken, kept = set(), set(schedule.kept)
        for group, then, now in zip(groups, saved, self._groups, strict=True):
            former = _numbers(then)
            for name in former.keys() & now.keys() & group.keys():
                if now[name] == former[name]:
                    continue
                shown = "learning rate" if name == _RATE else name
                if name not in _TAKEN or (rates is None and name.endswith("_lr")):
                    kept.add(f"{shown} {former[name]}, not {now[name]}")
                    continue
                taken.add(f"{shown} {now[name]} in place of {former[name]}")
                group[name] = now[name]
        # A formula of torch rounds otherwise than its steps, so it is only used if it must be.
        has_changed = schedule.has_changed or isinstance(schedule.inner, _BY_FORMULA) or taken
        change = _follow(rates, groups) if rates is not None and has_changed else None
        if change is not None and not any("learning rate" in one for one in taken):
            taken.add(
                f"learning rate {change} for the next update, because its schedule has changed"
            )
        if taken and this_rank() == 0:
            _LOG.warning("the optimizer goes on with %s", ", ".join(sorted(taken)))
        if kept and this_rank() == 0:
            told = ", ".join(sorted(kept))
            _LOG.warning("the optimizer keeps of its checkpoint %s: this cannot change now", told)

    def state_dict(self) -> list[dict[str, _Setting]]:
        """Return the settings of each parameter group, ready for JSON."""
        return self._groups


def _numbers(group: Mapping[str, Any]) -> dict[str, _Setting]:
    """Return the options of a parameter group that are numbers, or tuples of numbers."""
    return {
        name: tuple(value) if isinstance(value, (list, tuple)) else value
        for name, value in group.items()
        if name not in {"params", "lr"} and all(type(one) in {int, float} for one in _listed(value))
    }


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, (list, tuple)) else [value]


def _follow(
    rates: Callable[[int, Mapping[str, Any]], float], groups: Sequence[dict[str, Any]]
) -> str | None:
    """Set the rates of the next update; return how the first one that differs has changed."""
    change = None
    for number, group in enumerate(groups):
        if _RATE in group:
            loaded, rate = float(group["lr"]), rates(number, group)
            if not math.isclose(rate, loaded, rel_tol=_ROUNDING):
                group["lr"] = rate
                change = change or f"{rate:.4g} in place of {loaded:.4g}"
    return change


def _rates_of(schedule: Any) -> Callable[[int, Mapping[str, Any]], float] | None:
    """Return what gives a schedule the initial rate of a parameter group, and returns the next one.

    Some schedules of torch only make each rate from the one before, and cannot take another.

    Args:
        schedule: The schedule, without accelerate's wrapper.

    Returns:
        A function of the number of the group and the group; ``None`` if the schedule has none.
    """

    def set_rates(number: int, group: Mapping[str, Any]) -> float:
        initial = group[_RATE]
        schedule.base_lrs[number] = initial
        if isinstance(schedule, LambdaLR):
            rate: float = initial * schedule.lr_lambdas[number](schedule.last_epoch)
        else:
            rate = (formula_rates(schedule) or schedule.get_lr())[number]
        set_last_rate(schedule, number, rate)
        return rate

    return set_rates if _has_formula(schedule) else None


def _has_formula(schedule: Any) -> bool:
    return isinstance(schedule, _BY_FORMULA) or formula_rates(schedule) is not None


@final
class ContinuedSchedule:
    """Stand in for a schedule while a Trainer loads its state, which may be of another schedule.

    A schedule whose rates follow from a formula goes on at the step of the checkpoint, with its own
    settings. torch would give it those of the checkpoint, also of a schedule of another kind.

    Args:
        schedule: The schedule, with or without accelerate's wrapper.
    """

    def __init__(self, schedule: Any) -> None:
        self._schedule = schedule
        self.inner = getattr(schedule, "scheduler", schedule)
        """The schedule without wrapper."""
        self.has_changed = False
        """Whether the schedule has other settings than that of the checkpoint."""
        self.kept: list[str] = []
        """Settings of the checkpoint that the schedule has taken in place of its own."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._schedule, name)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a checkpoint.

        Raises:
            ValueError: If it is that of a schedule of another kind, and the rates of this one do
                not follow from a formula.
        """
        own, has_formula = self.inner.state_dict(), _has_formula(self.inner)
        ours, theirs = _settings(own), _settings(state)
        # Another version of torch may have added a setting to the same schedule.
        is_other = not (ours <= theirs or theirs <= ours)
        kind = type(self.inner).__name__
        if is_other and not has_formula:
            has = ", ".join(sorted(theirs))
            msg = (
                f"the checkpoint has the state of another schedule than {kind} (with {has}), which "
                "cannot begin in the middle; resume with the former schedule, or with a "
                "`lr_scheduler_type` of transformers"
            )
            raise ValueError(msg)
        given = inspect.signature(type(self.inner)).parameters.keys() & ours & theirs
        changed = sorted(name for name in given if own[name] != state[name])
        self.has_changed = is_other or bool(changed)
        if has_formula and self.has_changed:
            progress = {one: state[one] for one in state if one in _PROGRESS or one[0] == "_"}
            state = {**own, **progress}
        elif changed:
            self.kept = [f"{kind}'s {one} {state[one]}, not {own[one]}" for one in changed]
        self._schedule.load_state_dict(state)


def _settings(state: Mapping[str, Any]) -> set[str]:
    return {name for name in state if name not in {*_PROGRESS, "verbose"} and name[0] != "_"}
