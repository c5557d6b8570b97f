"""What MindFormers' schedules have in common: rates from a closed formula, and a warm-up."""

import abc
import math
from typing import Any, TypedDict

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mfwrap.arguments import described

__all__ = [
    "FormulaLR",
    "WarmUp",
    "WarmUpLR",
    "between",
    "check_number",
    "check_steps",
    "end_of_cosine",
    "half_wave",
    "progress",
    "run_length",
    "steps_of",
]


class FormulaLR(LRScheduler, abc.ABC):
    """Base of schedules whose rates depend on nothing but the number of updates.

    The rate of the first update is that of step 0. Each parameter group has its own rate: its
    ``lr`` when the schedule is made takes the place of MindFormers' ``learning_rate``. The state
    holds numbers alone.

    Args:
        optimizer: Whose rates are set.
        last_epoch: Step to go on after; -1 to begin.
    """

    def __init__(self, optimizer: Optimizer, last_epoch: int = -1) -> None:
        super().__init__(optimizer, last_epoch)

    @abc.abstractmethod
    def rate(self, learning_rate: Any, step: int) -> Any:
        """Return the rate of a step.

        Args:
            learning_rate: The group's own, a number or a tensor of shape ``()``.
            step: Number of updates before, >= 0.

        Returns:
            A number, or a tensor if `learning_rate` is one.
        """

    def get_lr(self) -> list[Any]:
        """Return the rate of each group at the step where the schedule stands."""
        return [self.rate(learning_rate, self.last_epoch) for learning_rate in self.base_lrs]


class WarmUp(TypedDict, total=False):
    """Keywords that every schedule with a warm-up takes; see `WarmUpLR`."""

    warmup_steps: int | None
    warmup_lr_init: float
    warmup_ratio: float | None
    last_epoch: int


class WarmUpLR(FormulaLR):
    """Base of schedules that first rise linearly to the group's rate.

    ``warmup_lr_init + (learning_rate - warmup_lr_init) * step / warmup_steps``.

    Args:
        optimizer: Whose rates are set.
        total_steps: Number of updates of the run; ``None`` if nothing depends on it.
        warmup_steps: Number of updates of the warm-up, >= 0.
        warmup_lr_init: Rate of the first update, >= 0.
        warmup_ratio: In [0, 1], instead of `warmup_steps`: ``int(total_steps * warmup_ratio)``.
        last_epoch: Step to go on after; -1 to begin.

    Raises:
        TypeError: If an argument has the wrong type, or neither `warmup_steps` nor `warmup_ratio`
            is given.
        ValueError: If an argument is out of range, `warmup_ratio` has no `total_steps`, or the
            warm-up is longer than the run.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int | None,
        *,
        warmup_steps: int | None = None,
        warmup_lr_init: float = 0.0,
        warmup_ratio: float | None = None,
        last_epoch: int = -1,
    ) -> None:
        steps = steps_of("warmup", warmup_steps, warmup_ratio, total_steps)
        if steps is None:
            msg = "`warmup_steps` must be an int, got None; give it or `warmup_ratio`"
            raise TypeError(msg)
        if total_steps is not None and steps > check_steps("total_steps", total_steps, at_least=1):
            msg = f"`warmup_steps` must be <= total_steps={total_steps}, got {steps}"
            raise ValueError(msg)
        self.total_steps = total_steps
        self.warmup_steps = steps
        self.warmup_lr_init = check_number("warmup_lr_init", warmup_lr_init)
        super().__init__(optimizer, last_epoch)

    def rate(self, learning_rate: Any, step: int) -> Any:
        if step < self.warmup_steps:
            rise = learning_rate - self.warmup_lr_init
            return self.warmup_lr_init + rise * step / self.warmup_steps
        return self.rate_after(learning_rate, step)

    @abc.abstractmethod
    def rate_after(self, learning_rate: Any, step: int) -> Any:
        """Return the rate of a step after the warm-up."""


def steps_of(
    name: str, steps: int | None, ratio: float | None, total_steps: int | None
) -> int | None:
    """Return a number of updates that is given as such or as a part of the run.

    Args:
        name: What the arguments begin with, ``"warmup"`` for ``warmup_steps``.
        steps: >= 0; ``None`` if it is not given.
        ratio: In [0, 1], takes precedence; ``None`` if it is not given.
        total_steps: Of the run.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or there is a ratio and no `total_steps`.
    """
    if ratio is None:
        return None if steps is None else check_steps(f"{name}_steps", steps)
    if check_number(f"{name}_ratio", ratio) > 1:
        msg = f"`{name}_ratio` must be in [0, 1], got {ratio}"
        raise ValueError(msg)
    if total_steps is None:
        msg = f"`{name}_ratio` needs `total_steps`, got None"
        raise ValueError(msg)
    return int(check_steps("total_steps", total_steps, at_least=1) * ratio)


def check_steps(name: str, value: object, *, at_least: int = 0) -> int:
    """Return `value`; raise ``TypeError`` if it is no int, ``ValueError`` if it is too small."""
    if isinstance(value, bool) or not isinstance(value, int):
        msg = f"`{name}` must be an int, got {described(value)}"
        raise TypeError(msg)
    if value < at_least:
        msg = f"`{name}` must be >= {at_least}, got {value}"
        raise ValueError(msg)
    return value


def check_number(name: str, value: object) -> float:
    """Return `value` as a float; ``TypeError`` if it is no number, ``ValueError`` if < 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"`{name}` must be a number, got {described(value)}"
        raise TypeError(msg)
    if not 0 <= value < math.inf:
        msg = f"`{name}` must be >= 0 and finite, got {value}"
        raise ValueError(msg)
    return float(value)


def between(lowest: float, highest: Any, part: float) -> Any:
    """Return what lies a part of the way from `lowest` to `highest`."""
    return lowest + (highest - lowest) * part


def half_wave(halves: float) -> float:
    """Return a cosine between 1 at 0 and 0 at 1."""
    return 0.5 * (1 + math.cos(math.pi * halves))


def progress(step: int, begins: int, ends: int) -> float:
    """Return the part of the way from one step to another."""
    return (step - begins) / max(1, ends - begins)


def run_length(total_steps: int | None) -> int:
    """Return `total_steps`.

    Raises:
        TypeError: If it is not an int.
        ValueError: If it is ``None`` or < 1.
    """
    if total_steps is None:
        msg = "`total_steps` must be given, got None"
        raise ValueError(msg)
    return check_steps("total_steps", total_steps, at_least=1)


def end_of_cosine(decay_steps: int | None, decay_ratio: float | None, total_steps: int) -> int:
    """Return the step from which on a cosine is over: not after the run, when it would rise again.

    Raises:
        TypeError: As `steps_of`.
        ValueError: As `steps_of`.
    """
    ends = steps_of("decay", decay_steps, decay_ratio, total_steps)
    return total_steps if ends is None else min(ends, total_steps)
