"""Base classes of MindFormers' schedules, and the arithmetic that the schedules share."""

import abc
import math
import warnings
from typing import Any, TypedDict

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from mfwrap.arguments import callers_stacklevel, check_int, check_number


class FormulaLR(LRScheduler, abc.ABC):
    """Base of schedules that compute the rate from the number of updates alone.

    The first update uses the rate of step 0. Each parameter group has its own rate: in the
    formulas, ``learning_rate`` is the group's ``lr`` when the schedule is constructed. The state
    dict holds only numbers.

    Args:
        optimizer: Optimizer whose learning rates the schedule sets.
        last_epoch: Last step of an earlier run to continue from; -1 starts at step 0.
    """

    @abc.abstractmethod
    def rate(self, learning_rate: Any, step: int) -> Any:
        """Return a parameter group's learning rate at a step.

        Args:
            learning_rate: Initial rate of the group, a number or a tensor of shape ``()``.
            step: Index of the update, from 0.

        Returns:
            A number, or a tensor if `learning_rate` is a tensor.
        """

    def get_lr(self) -> list[Any]:
        """Return the rate of each parameter group at the current step."""
        return [self.rate(learning_rate, self.last_epoch) for learning_rate in self.base_lrs]


class WarmUp(TypedDict, total=False):
    """Keywords that every schedule with a warm-up takes; see `WarmUpLR`."""

    warmup_steps: int | None
    warmup_lr_init: float
    warmup_ratio: float | None
    last_epoch: int


class WarmUpLR(FormulaLR):
    """Base of schedules that first rise linearly to the group's rate.

    The rate during the warm-up is
    ``warmup_lr_init + (learning_rate - warmup_lr_init) * step / warmup_steps``.

    Args:
        optimizer: Optimizer whose learning rates the schedule sets.
        total_steps: Number of updates of the run; ``None`` if the schedule does not need it.
        warmup_steps: Number of updates of the warm-up, >= 0.
        warmup_lr_init: Rate of the first update, >= 0.
        warmup_ratio: Length of the warm-up as a share of the run, in [0, 1]: the warm-up has
            ``int(total_steps * warmup_ratio)`` updates, and `warmup_steps` is ignored.
        last_epoch: Last step of an earlier run to continue from; -1 starts at step 0.

    Raises:
        TypeError: If an argument has the wrong type, or both `warmup_steps` and `warmup_ratio`
            are missing.
        ValueError: If an argument is out of range, or `warmup_ratio` is given without
            `total_steps`.

    Warns:
        UserWarning: If the warm-up is longer than the run, so that no update has the group's rate.
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
        self.warmup_steps = steps_of_warm_up(warmup_steps, warmup_ratio, total_steps)
        self.total_steps = None if total_steps is None else check_int("total_steps", total_steps)
        if self.total_steps is not None and self.warmup_steps > self.total_steps:
            says = f"the warm-up has {self.warmup_steps} updates, the run {total_steps}"
            msg = f"{says}: no update has the full learning rate"
            warnings.warn(msg, stacklevel=callers_stacklevel())
        self.warmup_lr_init = check_number("warmup_lr_init", warmup_lr_init)
        super().__init__(optimizer, last_epoch)

    def rate(self, learning_rate: Any, step: int) -> Any:
        if step < self.warmup_steps:
            rise = learning_rate - self.warmup_lr_init
            return self.warmup_lr_init + rise * step / self.warmup_steps
        return self.rate_after(learning_rate, step)

    @abc.abstractmethod
    def rate_after(self, learning_rate: Any, step: int) -> Any:
        """Return the rate of a step after the warm-up; arguments as for `rate`."""

    def progress(self, step: int, *, since: int | None = None, until: int | None = None) -> float:
        """Return a step's relative position: 0 at `since`, 1 at `until`, above 1 afterwards.

        Args:
            step: Index of the update, from 0.
            since: Step at which the result is 0; by default the end of the warm-up.
            until: Step at which the result is 1; by default `total_steps`, which must then be set.
        """
        start = self.warmup_steps if since is None else since
        end = run_length(self.total_steps) if until is None else until
        return (step - start) / max(1, end - start)


def steps_of(
    name: str, steps: int | None, ratio: float | None, total_steps: int | None
) -> int | None:
    """Return the number of updates of a phase, set either directly or as a share of the run.

    Args:
        name: Prefix of the arguments' names in errors, such as ``"warmup"`` for ``warmup_steps``.
        steps: Number of updates, >= 0; ``None`` if it is not set.
        ratio: Share of the run in [0, 1], used instead of `steps`; ``None`` if it is not set.
        total_steps: Number of updates of the run.

    Returns:
        The number of updates; ``None`` if neither `steps` nor `ratio` is set.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range, or `ratio` is set without `total_steps`.
    """
    if ratio is None:
        return None if steps is None else check_int(f"{name}_steps", steps, minimum=0)
    if check_number(f"{name}_ratio", ratio) > 1:
        msg = f"`{name}_ratio` must be in [0, 1], got {ratio}"
        raise ValueError(msg)
    if total_steps is None:
        msg = f"`{name}_ratio` needs `total_steps`, got None"
        raise ValueError(msg)
    return int(check_int("total_steps", total_steps) * ratio)


def steps_of_warm_up(steps: int | None, ratio: float | None, total_steps: int | None) -> int:
    """Return the number of updates of a warm-up; arguments as for `steps_of`.

    Raises:
        TypeError: As `steps_of`, and if neither `steps` nor `ratio` is set.
        ValueError: As `steps_of`.
    """
    length = steps_of("warmup", steps, ratio, total_steps)
    if length is None:
        msg = "`warmup_steps` must be an int, got None; set `warmup_steps` or `warmup_ratio`"
        raise TypeError(msg)
    return length


def run_length(total_steps: int | None) -> int:
    """Return `total_steps` after checking it.

    Raises:
        TypeError: If `total_steps` is not an int.
        ValueError: If `total_steps` is ``None`` or < 1.
    """
    if total_steps is None:
        msg = "`total_steps` must be given, got None"
        raise ValueError(msg)
    return check_int("total_steps", total_steps)


def between(lowest: float, highest: Any, part: float) -> Any:
    """Interpolate linearly: return `lowest` for a `part` of 0, `highest` for a `part` of 1."""
    return lowest + (highest - lowest) * part


def half_wave(halves: float) -> float:
    """Return the cosine after `halves` half waves, scaled to [0, 1]: 1 at 0, 0 at 1, 1 at 2."""
    return 0.5 * (1 + math.cos(math.pi * halves))
