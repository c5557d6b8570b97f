"""MindFormers' schedules that follow a cosine, with and without a warm-up.

In the formulas ``p = (step - warmup_steps) / (total_steps - warmup_steps)``.
"""

from typing import Any, Unpack, final

from torch.optim import Optimizer

from mfwrap.arguments import check_int, check_number
from mfwrap.schedules.formula import (
    FormulaLR,
    WarmUp,
    WarmUpLR,
    between,
    half_wave,
    run_length,
    steps_of,
)


class _WarmUpAndCosineLR(WarmUpLR):
    """Base of the two schedules that warm up and then follow a cosine until `decay_steps`."""

    def __init__(
        self,
        optimizer: Optimizer,
        total_steps: int,
        num_cycles: float,
        lr_end: float,
        decay_steps: int | None,
        **warm_up: Unpack[WarmUp],
    ) -> None:
        length = run_length(total_steps)
        end = steps_of("decay", decay_steps, None, length)
        self.num_cycles = check_number("num_cycles", num_cycles)
        self.lr_end = check_number("lr_end", lr_end)
        # Limit `decay_steps` to the run's length: after the run the cosine would rise again.
        self.decay_steps = length if end is None else min(end, length)
        super().__init__(optimizer, length, **warm_up)

    def rate(self, learning_rate: Any, step: int) -> Any:
        # Check `decay_steps` first, as MindFormers does: a small value cuts off even the warm-up.
        return self.lr_end if step >= self.decay_steps else super().rate(learning_rate, step)

    def _cycles_at(self, step: int) -> float:
        return self.num_cycles * self.progress(step)


@final
class CosineWithWarmUpLR(_WarmUpAndCosineLR):
    """Warm up to the group's rate, then fall to `lr_end` along a cosine.

    The rate after the warm-up is
    ``lr_end + (learning_rate - lr_end) * (1 + cos(2 * pi * num_cycles * p)) / 2``.

    Source: MindFormers, ``CosineWithWarmUpLR``.

    Args:
        optimizer: Optimizer whose learning rates the schedule sets.
        total_steps: Number of updates of the run.
        num_cycles: Number of full cosine waves between the end of the warm-up and the end of the
            run. The default, 0.5, is a single fall.
        lr_end: Rate from step `decay_steps` on.
        decay_steps: Step from which the rate is `lr_end`. The default is `total_steps`; larger
            values are reduced to `total_steps`.
        decay_ratio: `decay_steps` as a share of the run, in [0, 1]:
            ``int(total_steps * decay_ratio)``. If it is set, `decay_steps` is ignored.
        warm_up: Settings of the warm-up; see `WarmUpLR`. Here `warmup_steps` is 0 by default.

    Raises:
        TypeError: As `WarmUpLR`.
        ValueError: As `WarmUpLR`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> schedule = CosineWithWarmUpLR(optimizer, total_steps=20, warmup_steps=10, lr_end=0.01)
        >>> [round(schedule.rate(0.1, step), 3) for step in (0, 5, 10, 15, 20)]
        [0.0, 0.05, 0.1, 0.055, 0.01]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_steps: int,
        num_cycles: float = 0.5,
        lr_end: float = 0.0,
        decay_steps: int | None = None,
        decay_ratio: float | None = None,
        **warm_up: Unpack[WarmUp],
    ) -> None:
        warm_up.setdefault("warmup_steps", 0)
        end = steps_of("decay", decay_steps, decay_ratio, run_length(total_steps))
        super().__init__(optimizer, total_steps, num_cycles, lr_end, end, **warm_up)

    def rate_after(self, learning_rate: Any, step: int) -> Any:
        return between(self.lr_end, learning_rate, half_wave(2 * self._cycles_at(step)))


@final
class CosineWithRestartsAndWarmUpLR(_WarmUpAndCosineLR):
    """Warm up, then fall from the group's rate to `lr_end` along a cosine, `num_cycles` times.

    The rate after the warm-up is
    ``lr_end + (learning_rate - lr_end) * (1 + cos(pi * (num_cycles * p % 1))) / 2``.

    Source: MindFormers, ``CosineWithRestartsAndWarmUpLR``.

    Args:
        optimizer: Optimizer whose learning rates the schedule sets.
        total_steps: Number of updates of the run.
        num_cycles: Number of falls between the end of the warm-up and the end of the run.
        lr_end: Rate from step `decay_steps` on.
        decay_steps: Step from which the rate is `lr_end`. The default is `total_steps`; larger
            values are reduced to `total_steps`.
        warm_up: Settings of the warm-up; see `WarmUpLR`.

    Raises:
        TypeError: As `WarmUpLR`.
        ValueError: As `WarmUpLR`.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> schedule = CosineWithRestartsAndWarmUpLR(
        ...     optimizer, total_steps=8, warmup_steps=0, num_cycles=2
        ... )
        >>> [round(schedule.rate(0.1, step), 3) for step in (0, 2, 4, 6, 8)]
        [0.1, 0.05, 0.1, 0.05, 0.0]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        total_steps: int,
        num_cycles: float = 1.0,
        lr_end: float = 0.0,
        decay_steps: int | None = None,
        **warm_up: Unpack[WarmUp],
    ) -> None:
        super().__init__(optimizer, total_steps, num_cycles, lr_end, decay_steps, **warm_up)

    def rate_after(self, learning_rate: Any, step: int) -> Any:
        return between(self.lr_end, learning_rate, half_wave(self._cycles_at(step) % 1))


@final
class ConstantWithCoolDownLR(WarmUpLR):
    """Warm up to the group's rate, keep it, fall to `lr_end1` along a cosine, end at `lr_end2`.

    With ``p = (step - warmup_steps - keep_steps) / decay_steps``, the rate during the fall is
    ``lr_end1 + (learning_rate - lr_end1) * (1 + cos(2 * pi * num_cycles * p)) / 2``.

    Source: MindFormers, ``ConstantWithCoolDownLR``; DeepSeek-V3 Technical Report, 2024, page 23.

    Args:
        optimizer: Optimizer whose learning rates the schedule sets.
        keep_steps: Number of updates at the group's rate after the warm-up, >= 0.
        decay_steps: Number of updates of the fall, >= 1. The default is `total_steps` minus the
            warm-up, `keep_steps` and `final_steps`.
        decay_ratio: `decay_steps` as a share of the run, in [0, 1]:
            ``int(total_steps * decay_ratio)``. If it is set, `decay_steps` is ignored.
        total_steps: Number of updates of the run. Required with `warmup_ratio` or `decay_ratio`,
            and if `decay_steps` is not set.
        num_cycles: Number of full cosine waves during the fall. The default, 0.5, is a single
            fall.
        lr_end1: Rate after the fall.
        final_steps: Number of updates at `lr_end1`, >= 0.
        lr_end2: Rate after the `final_steps`; ``None`` keeps `lr_end1`.
        warm_up: Settings of the warm-up; see `WarmUpLR`.

    Raises:
        TypeError: As `WarmUpLR`.
        ValueError: As `WarmUpLR`, and if `total_steps` is missing but required.

    Example:
        >>> import torch
        >>> optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        >>> schedule = ConstantWithCoolDownLR(
        ...     optimizer, warmup_steps=2, keep_steps=2, decay_steps=4, lr_end1=0.02, final_steps=2,
        ...     lr_end2=0.01,
        ... )
        >>> [round(schedule.rate(0.1, step), 3) for step in (0, 1, 2, 4, 6, 8, 9, 10)]
        [0.0, 0.05, 0.1, 0.1, 0.06, 0.02, 0.02, 0.01]
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        keep_steps: int = 0,
        decay_steps: int | None = None,
        decay_ratio: float | None = None,
        total_steps: int | None = None,
        num_cycles: float = 0.5,
        lr_end1: float = 0.0,
        final_steps: int = 0,
        lr_end2: float | None = None,
        **warm_up: Unpack[WarmUp],
    ) -> None:
        self.keep_steps = check_int("keep_steps", keep_steps, minimum=0)
        self.final_steps = check_int("final_steps", final_steps, minimum=0)
        self.num_cycles = check_number("num_cycles", num_cycles)
        self.lr_end1 = check_number("lr_end1", lr_end1)
        self.lr_end2 = self.lr_end1 if lr_end2 is None else check_number("lr_end2", lr_end2)
        falls = steps_of("decay", decay_steps, decay_ratio, total_steps)
        if falls is None:
            warms = steps_of(
                "warmup", warm_up.get("warmup_steps"), warm_up.get("warmup_ratio"), total_steps
            )
            falls = run_length(total_steps) - (warms or 0) - keep_steps - final_steps
        self.decay_steps = check_int("decay_steps", falls)
        super().__init__(optimizer, total_steps, **warm_up)

    def rate_after(self, learning_rate: Any, step: int) -> Any:
        fallen = step - self.warmup_steps - self.keep_steps
        if fallen >= self.decay_steps:
            holds = fallen < self.decay_steps + self.final_steps
            return self.lr_end1 if holds else self.lr_end2
        waves = self.num_cycles * max(0, fallen) / self.decay_steps
        return between(self.lr_end1, learning_rate, half_wave(2 * waves))


@final
class CosineAnnealingLR(FormulaLR):
    """Swing between the group's rate and `eta_min` along a cosine.

    The rate is ``eta_min + (learning_rate - eta_min) * (1 + cos(pi * step / t_max)) / 2``.

    Source: MindFormers, ``CosineAnnealingLR``; Loshchilov and Hutter, SGDR, 2017.

    Args:
        optimizer: Optimizer whose learning rates the schedule sets.
        t_max: Number of updates of one fall or one rise, >= 1.
        eta_min: Lowest rate, >= 0.
        last_epoch: Last step of an earlier run to continue from; -1 starts at step 0.

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
        self.t_max = check_int("t_max", t_max)
        self.eta_min = check_number("eta_min", eta_min)
        super().__init__(optimizer, last_epoch)

    def rate(self, learning_rate: Any, step: int) -> Any:
        return between(self.eta_min, learning_rate, half_wave(step / self.t_max))


@final
class CosineAnnealingWarmRestarts(FormulaLR):
    """Fall from the group's rate to `eta_min` along a cosine, then restart.

    The rate is
    ``eta_min + (learning_rate - eta_min) * (1 + cos(pi * since_restart / period)) / 2``, where
    ``since_restart`` is the number of updates since the last restart and ``period`` is the number
    of updates between the last restart and the next.

    Source: MindFormers, ``CosineAnnealingWarmRestarts``; Loshchilov and Hutter, SGDR, 2017.

    Args:
        optimizer: Optimizer whose learning rates the schedule sets.
        t_0: Number of updates of the first period, >= 1.
        t_mult: Ratio of each period's length to that of the previous period, an int >= 1.
        eta_min: Lowest rate, >= 0.
        last_epoch: Last step of an earlier run to continue from; -1 starts at step 0.

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
        self.t_0 = check_int("t_0", t_0)
        self.t_mult = check_int("t_mult", t_mult)
        self.eta_min = check_number("eta_min", eta_min)
        super().__init__(optimizer, last_epoch)

    def rate(self, learning_rate: Any, step: int) -> Any:
        # Integer arithmetic: a float32 logarithm would pick the wrong period at some restarts.
        period, since_restart = self.t_0, step
        if self.t_mult == 1:
            since_restart = step % period
        while since_restart >= period:
            since_restart -= period
            period *= self.t_mult
        return between(self.eta_min, learning_rate, half_wave(since_restart / period))
