"""MindFormers' schedules that begin with a warm-up and go on without a cosine."""

from typing import Any, Unpack, final

from torch.optim import Optimizer

from mfwrap.arguments import check_positive_number
from mfwrap.schedules.formula import (
    WarmUp,
    WarmUpLR,
    between,
    check_number,
    check_steps,
    progress,
    run_length,
    steps_of,
)

__all__ = [
    "ConstantWarmUpLR",
    "LinearWithWarmUpLR",
    "PolynomialWithWarmUpLR",
    "WarmUpStableDecayLR",
]


@final
class ConstantWarmUpLR(WarmUpLR):
    """Rise to the group's rate, and keep it.

    Source: MindFormers, ``ConstantWarmUpLR``.

    Args:
        optimizer: Whose rates are set.
        total_steps: As `WarmUpLR`.
        warm_up: As `WarmUpLR`.

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
    """Rise to the group's rate, and fall to 0 at `total_steps`: ``learning_rate * (1 - p)``.

    ``p = (step - warmup_steps) / (total_steps - warmup_steps)``.

    Source: MindFormers, ``LinearWithWarmUpLR``.

    Args:
        optimizer: Whose rates are set.
        total_steps: Number of updates of the run.
        warm_up: As `WarmUpLR`.

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
        self._run_ends = run_length(total_steps)
        super().__init__(optimizer, total_steps, **warm_up)

    def rate_after(self, learning_rate: Any, step: int) -> Any:
        return learning_rate * max(0.0, 1 - progress(step, self.warmup_steps, self._run_ends))


@final
class PolynomialWithWarmUpLR(WarmUpLR):
    """Rise to the group's rate, and fall to `lr_end` along a power.

    ``lr_end + (learning_rate - lr_end) * (1 - (step - warmup_steps) / decay_steps) ** power``.

    Source: MindFormers, ``PolynomialWithWarmUpLR``.

    Args:
        optimizer: Whose rates are set.
        total_steps: Number of updates of the run.
        lr_end: Rate after the fall and after the run, below that of each group.
        power: > 0.
        decay_steps: Number of updates of the fall, >= 1; by default all after the warm-up.
        warm_up: As `WarmUpLR`.

    Raises:
        TypeError: As `WarmUpLR`.
        ValueError: As `WarmUpLR`, and if `lr_end` is not below the rate of a group.

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
        self._run_ends = run_length(total_steps)
        self.lr_end = check_number("lr_end", lr_end)
        self.power = check_positive_number("power", power, finite=True)
        self.decay_steps = decay_steps
        if decay_steps is not None:
            check_steps("decay_steps", decay_steps, at_least=1)
        for group in optimizer.param_groups:
            if not group.get("initial_lr", group["lr"]) > self.lr_end:
                msg = f"`lr_end` must be below the rate {group['lr']} of each group, got {lr_end}"
                raise ValueError(msg)
        super().__init__(optimizer, total_steps, **warm_up)

    def rate_after(self, learning_rate: Any, step: int) -> Any:
        ends = self._run_ends
        if self.decay_steps is not None:
            ends = self.warmup_steps + self.decay_steps
        fallen = progress(step, self.warmup_steps, ends)
        if fallen >= 1 or step > self._run_ends:
            return self.lr_end
        return between(self.lr_end, learning_rate, (1 - fallen) ** self.power)


@final
class WarmUpStableDecayLR(WarmUpLR):
    """Rise to the group's rate, keep it, and fall to `lr_end` at `total_steps` linearly.

    Source: MindFormers, ``WarmUpStableDecayLR``.

    Args:
        optimizer: Whose rates are set.
        total_steps: Number of updates of the run.
        lr_end: Rate from `total_steps` on.
        decay_start_steps: The step from which on the rate falls.
        decay_start_ratio: In [0, 1], instead of `decay_start_steps`:
            ``int(total_steps * decay_start_ratio)``.
        warm_up: As `WarmUpLR`.

    Raises:
        TypeError: As `WarmUpLR`, and if neither `decay_start_steps` nor `decay_start_ratio` is
            given.
        ValueError: As `WarmUpLR`, and if the fall begins before the warm-up ends or after the run.

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
        self._run_ends = run_length(total_steps)
        self.lr_end = check_number("lr_end", lr_end)
        starts = steps_of("decay_start", decay_start_steps, decay_start_ratio, total_steps)
        if starts is None:
            msg = "`decay_start_steps` must be an int, got None; give it or `decay_start_ratio`"
            raise TypeError(msg)
        warms = steps_of(
            "warmup", warm_up.get("warmup_steps"), warm_up.get("warmup_ratio"), total_steps
        )
        if not (warms or 0) <= starts <= total_steps:
            msg = (
                f"`decay_start_steps` must be in [{warms}, {total_steps}], from the end of the "
                f"warm-up to that of the run, got {starts}"
            )
            raise ValueError(msg)
        self.decay_start_steps = starts
        super().__init__(optimizer, total_steps, **warm_up)

    def rate_after(self, learning_rate: Any, step: int) -> Any:
        if step >= self._run_ends:
            return self.lr_end
        fallen = max(0.0, progress(step, self.decay_start_steps, self._run_ends))
        return between(self.lr_end, learning_rate, 1 - fallen)
