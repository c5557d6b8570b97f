"""MindFormers' schedules that warm up and then stay constant, or fall linearly or by a power."""

from typing import Any, Unpack, final

from torch.optim import Optimizer

from mfwrap.arguments import check_int, check_number, check_positive_number
from mfwrap.schedules.formula import (
    WarmUp,
    WarmUpLR,
    between,
    run_length,
    steps_of,
    steps_of_warm_up,
)


@final
class ConstantWarmUpLR(WarmUpLR):
    """Warm up to the group's rate and stay there.

    Source: MindFormers, ``ConstantWarmUpLR``.

    Args:
        optimizer: Optimizer whose learning rates the schedule sets.
        total_steps: Number of updates of the run; only `warmup_ratio` needs it.
        warm_up: Settings of the warm-up; see `WarmUpLR`.

    Raises:
        TypeError: As `WarmUpLR`.
        ValueError: As `WarmUpLR`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> ConstantWarmUpLR(optimizer, warmup_steps=10).rate(0.1, step=5)
        0.05
    """

    def __init__(
        self, optimizer: Optimizer, *, total_steps: int | None = None, **warm_up: Unpack[WarmUp]
    ) -> None:
        super().__init__(optimizer, total_steps, **warm_up)

    def rate_after(self, learning_rate: Any, step: int) -> Any:
        del step
        return learning_rate


@final
class LinearWithWarmUpLR(WarmUpLR):
    """Warm up to the group's rate, then fall linearly to 0 at `total_steps`.

    The rate after the warm-up is ``learning_rate * (1 - p)`` with
    ``p = (step - warmup_steps) / (total_steps - warmup_steps)``.

    Source: MindFormers, ``LinearWithWarmUpLR``.

    Args:
        optimizer: Optimizer whose learning rates the schedule sets.
        total_steps: Number of updates of the run.
        warm_up: Settings of the warm-up; see `WarmUpLR`.

    Raises:
        TypeError: As `WarmUpLR`.
        ValueError: As `WarmUpLR`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> LinearWithWarmUpLR(optimizer, total_steps=20, warmup_steps=10).rate(0.1, step=15)
        0.05
    """

    def __init__(
        self, optimizer: Optimizer, *, total_steps: int, **warm_up: Unpack[WarmUp]
    ) -> None:
        super().__init__(optimizer, run_length(total_steps), **warm_up)

    def rate_after(self, learning_rate: Any, step: int) -> Any:
        length = run_length(self.total_steps)
        return learning_rate * max(0, length - step) / max(1, length - self.warmup_steps)


@final
class PolynomialWithWarmUpLR(WarmUpLR):
    """Warm up to the group's rate, then fall to `lr_end` following a power function.

    The rate after the warm-up is
    ``lr_end + (learning_rate - lr_end) * (1 - (step - warmup_steps) / decay_steps) ** power``.

    Source: MindFormers, ``PolynomialWithWarmUpLR``.

    Args:
        optimizer: Optimizer whose learning rates the schedule sets.
        total_steps: Number of updates of the run.
        lr_end: Rate after the fall, and after the run. Must be below each group's initial rate.
        power: Exponent, > 0.
        decay_steps: Number of updates of the fall, >= 1; by default all updates after the warm-up.
        warm_up: Settings of the warm-up; see `WarmUpLR`.

    Raises:
        TypeError: As `WarmUpLR`.
        ValueError: As `WarmUpLR`, and if `lr_end` is not below each group's initial rate.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> schedule = PolynomialWithWarmUpLR(optimizer, total_steps=4, warmup_steps=0, power=2)
        >>> [round(schedule.rate(0.1, step), 3) for step in (0, 1, 2, 3, 4)]
        [0.1, 0.056, 0.025, 0.006, 0.0]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_steps: int,
        lr_end: float = 1e-7,
        power: float = 1.0,
        decay_steps: int | None = None,
        **warm_up: Unpack[WarmUp],
    ) -> None:
        self.lr_end = check_number("lr_end", lr_end)
        self.power = check_positive_number("power", power, finite=True)
        self.decay_steps = None if decay_steps is None else check_int("decay_steps", decay_steps)
        for group in optimizer.param_groups:
            rate = group.get("initial_lr", group["lr"])
            if not rate > self.lr_end:
                msg = (
                    f"`lr_end` must be below the initial rate of each group, got {lr_end} for a "
                    f"group with the initial rate {rate}"
                )
                raise ValueError(msg)
        super().__init__(optimizer, run_length(total_steps), **warm_up)

    def rate_after(self, learning_rate: Any, step: int) -> Any:
        end = None if self.decay_steps is None else self.warmup_steps + self.decay_steps
        fallen = self.progress(step, until=end)
        if fallen >= 1 or step > run_length(self.total_steps):
            return self.lr_end
        return between(self.lr_end, learning_rate, (1 - fallen) ** self.power)


@final
class WarmUpStableDecayLR(WarmUpLR):
    """Warm up to the group's rate, stay there, then fall linearly to `lr_end` at `total_steps`.

    Source: MindFormers, ``WarmUpStableDecayLR``.

    Args:
        optimizer: Optimizer whose learning rates the schedule sets.
        total_steps: Number of updates of the run.
        lr_end: Rate from `total_steps` on.
        decay_start_steps: Step at which the fall begins.
        decay_start_ratio: `decay_start_steps` as a share of the run, in [0, 1]:
            ``int(total_steps * decay_start_ratio)``. If it is set, `decay_start_steps` is ignored.
        warm_up: Settings of the warm-up; see `WarmUpLR`.

    Raises:
        TypeError: As `WarmUpLR`, and if `decay_start_steps` and `decay_start_ratio` are both
            missing.
        ValueError: As `WarmUpLR`, and if the fall begins before the end of the warm-up or after the
            end of the run.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> schedule = WarmUpStableDecayLR(
        ...     optimizer, total_steps=10, warmup_steps=2, decay_start_ratio=0.5, lr_end=0.0
        ... )
        >>> [round(schedule.rate(0.1, step), 3) for step in (0, 1, 2, 5, 8, 10)]
        [0.0, 0.05, 0.1, 0.1, 0.04, 0.0]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_steps: int,
        lr_end: float = 1e-7,
        decay_start_steps: int | None = None,
        decay_start_ratio: float | None = None,
        **warm_up: Unpack[WarmUp],
    ) -> None:
        length = run_length(total_steps)
        warms = steps_of_warm_up(warm_up.get("warmup_steps"), warm_up.get("warmup_ratio"), length)
        self.lr_end = check_number("lr_end", lr_end)
        starts = steps_of("decay_start", decay_start_steps, decay_start_ratio, length)
        if starts is None:
            msg = (
                "`decay_start_steps` must be an int, got None; set `decay_start_steps` or "
                "`decay_start_ratio`"
            )
            raise TypeError(msg)
        earliest = min(warms, length)
        if not earliest <= starts <= length:
            msg = (
                f"`decay_start_steps` must be in [{earliest}, {length}], between the end of the "
                f"warm-up and the end of the run, got {starts}"
            )
            raise ValueError(msg)
        self.decay_start_steps = starts
        super().__init__(optimizer, length, **warm_up)

    def rate_after(self, learning_rate: Any, step: int) -> Any:
        if step >= run_length(self.total_steps):
            return self.lr_end
        fallen = max(0.0, self.progress(step, since=self.decay_start_steps))
        return between(self.lr_end, learning_rate, 1 - fallen)
