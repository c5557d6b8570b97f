"""MindFormers' schedules along a cosine without a warm-up."""

from typing import Any, final

from torch.optim import Optimizer

from mfwrap.schedules.formula import FormulaLR, check_number, check_steps
from mfwrap.schedules.schedule_formulas import between, half_wave

__all__ = ["CosineAnnealingLR", "CosineAnnealingWarmRestarts"]


@final
class CosineAnnealingLR(FormulaLR):
    """Go from the group's rate to `eta_min` and back along a cosine, over and over.

    ``eta_min + (learning_rate - eta_min) * (1 + cos(pi * step / t_max)) / 2``.

    Source: MindFormers, ``CosineAnnealingLR``; Loshchilov and Hutter, SGDR, 2017.

    Args:
        optimizer: Whose rates are set.
        t_max: Number of updates from one end to the other, >= 1.
        eta_min: The lower end.
        last_epoch: Step to go on after; -1 to begin.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> schedule = CosineAnnealingLR(optimizer, t_max=2)
        >>> [round(schedule.rate(0.1, step), 3) for step in range(5)]
        [0.1, 0.05, 0.0, 0.05, 0.1]
    """

    def __init__(
        self, optimizer: Optimizer, *, t_max: int, eta_min: float = 0.0, last_epoch: int = -1
    ) -> None:
        self.t_max = check_steps("t_max", t_max, at_least=1)
        self.eta_min = check_number("eta_min", eta_min)
        super().__init__(optimizer, last_epoch)

    def rate(self, learning_rate: Any, step: int) -> Any:
        return between(self.eta_min, learning_rate, half_wave(step / self.t_max))


@final
class CosineAnnealingWarmRestarts(FormulaLR):
    """Fall from the group's rate to `eta_min` along a cosine, over and over.

    ``eta_min + (learning_rate - eta_min) * (1 + cos(pi * since_restart / period)) / 2``.

    Source: MindFormers, ``CosineAnnealingWarmRestarts``; Loshchilov and Hutter, SGDR, 2017.

    Args:
        optimizer: Whose rates are set.
        t_0: Number of updates of the first period, >= 1.
        t_mult: By how much each period is longer than the one before, >= 1.
        eta_min: The lower end.
        last_epoch: Step to go on after; -1 to begin.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> schedule = CosineAnnealingWarmRestarts(optimizer, t_0=2, t_mult=2)
        >>> [round(schedule.rate(0.1, step), 3) for step in range(7)]
        [0.1, 0.05, 0.1, 0.085, 0.05, 0.015, 0.1]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        t_0: int,
        t_mult: int = 1,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.t_0 = check_steps("t_0", t_0, at_least=1)
        self.t_mult = check_steps("t_mult", t_mult, at_least=1)
        self.eta_min = check_number("eta_min", eta_min)
        super().__init__(optimizer, last_epoch)

    def rate(self, learning_rate: Any, step: int) -> Any:
        # Integers, because a logarithm in float32 misses some restarts by one period.
        period, since_restart = self.t_0, step
        if self.t_mult == 1:
            since_restart = step % period
        while since_restart >= period:
            since_restart -= period
            period *= self.t_mult
        return between(self.eta_min, learning_rate, half_wave(since_restart / period))
