"""Change the loss scale after each step: MindSpore's loss-scale update cells.

A cell is called with the loss scale and the overflow flag of a step, and changes the loss scale in
place. The cell's counters are on the training device, and no tensor is read on the host.
"""

import abc
import math
from collections.abc import Mapping
from typing import Any, Self, final

import torch
from torch import Tensor

from mfwrap.arguments import check_int, check_number, check_positive_number
from mfwrap.tensors.saved_state import check_keys, check_tensor
from mfwrap.tensors.shards import on_device


class LossScaleUpdateCell(abc.ABC):
    """Base class of the cells that change a loss scale after each step.

    Source: MindSpore, the ``Cell`` that ``TrainOneStepWithLossScaleCell`` takes as
    ``scale_sense``.

    Args:
        loss_scale_value: Initial loss scale, > 0 and finite.
        counters: Initial value of each counter that the rule needs. Counters are int64 tensors of
            shape ``()``, changed in place on the training device.

    Raises:
        TypeError: If `loss_scale_value` is not a number.
        ValueError: If `loss_scale_value` is not positive and finite.
    """

    def __init__(self, loss_scale_value: float, **counters: int) -> None:
        self.loss_scale_value = check_positive_number(
            "loss_scale_value", loss_scale_value, finite=True
        )
        self._counters = {
            name: torch.full((), value, dtype=torch.int64, device="cpu")
            for name, value in counters.items()
        }

    @abc.abstractmethod
    def __call__(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        """Change `loss_scale` in place and return `overflow`.

        Args:
            loss_scale: Shape ``()`` or ``(1,)``, float32.
            overflow: Whether the gradients of the step were non-finite: a tensor of one element,
                bool or number, on the device of `loss_scale`.

        Returns:
            `overflow`, unchanged. No synchronization with the device.
        """

    def get_loss_scale(self) -> float:
        """Return the initial loss scale."""
        return self.loss_scale_value

    def to(self, device: torch.device) -> None:
        """Move the counters to `device`."""
        for name, counter in self._counters.items():
            self._counters[name] = on_device(counter, device)

    def state_dict(self) -> dict[str, Tensor]:
        """Return copies of the counters. The loss scale itself belongs to the caller."""
        return {name: counter.clone() for name, counter in self._counters.items()}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the counters, or change nothing if `state_dict` does not fit.

        Raises:
            KeyError: If a counter is missing or unknown.
            TypeError: If a counter is not a tensor.
            ValueError: If a counter does not have shape ``()`` and dtype int64.
        """
        self.check_state_dict(state_dict)
        for name, counter in self._counters.items():
            counter.copy_(state_dict[name])

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raise the errors of `load_state_dict` without changing anything."""
        check_keys(state_dict, self._counters, "loss-scale update cell")
        for name, counter in self._counters.items():
            check_tensor(name, state_dict[name], counter)


class WindowedCell(LossScaleUpdateCell):
    """Base class of the cells that raise the loss scale after a window without overflow.

    Args:
        loss_scale_value: Initial loss scale, > 0 and finite.
        scale_factor: Factor by which the scale grows, >= 1.
        counters: Initial values of further counters of the rule.

    Raises:
        TypeError: If `loss_scale_value` or `scale_factor` is not a number.
        ValueError: If `loss_scale_value` or `scale_factor` is out of range.
    """

    def __init__(self, loss_scale_value: float, scale_factor: float, **counters: int) -> None:
        super().__init__(loss_scale_value, cur_iter=1, last_overflow_iter=0, **counters)
        self.scale_factor = check_number("scale_factor", scale_factor, minimum=1)
        self._decrease_ratio = 1 / self.scale_factor

    def _change(
        self,
        loss_scale: Tensor,
        overflow: Tensor,
        *,
        falls: Tensor,
        window: int | Tensor,
        lowest: float,
    ) -> Tensor:
        """Change `loss_scale` in place, count the call and return whether the scale grew.

        The scale grows at the end of a window, unless the product is infinite.

        Args:
            loss_scale: Shape ``()`` or ``(1,)``, float32.
            overflow: Whether the step overflowed, which restarts the window; shape ``()``, bool.
            falls: Whether to lower the scale; shape ``()``, bool.
            window: Number of consecutive steps without overflow before the scale grows.
            lowest: Lower bound of the scale after a fall.

        Returns:
            Shape ``()``, bool.
        """
        call, last = self._counters["cur_iter"], self._counters["last_overflow_iter"]
        restarts = overflow | (call - last >= window)
        grown = loss_scale * self.scale_factor
        grows = (restarts ^ overflow) & (grown < math.inf).reshape(())
        # MindSpore multiplies by the float32 reciprocal; dividing would give a different last bit.
        fallen = (loss_scale * self._decrease_ratio).clamp(min=lowest)
        torch.where(falls, fallen, torch.where(grows, grown, loss_scale), out=loss_scale)
        torch.where(restarts, call, last, out=last)
        call.add_(1)
        return grows


@final
class FixedLossScaleUpdateCell(LossScaleUpdateCell):
    """Keep the loss scale fixed. Updates with non-finite gradients are still skipped.

    Source: MindSpore, ``nn.FixedLossScaleUpdateCell``.

    Args:
        loss_scale_value: The loss scale, > 0 and finite.

    Raises:
        TypeError: If `loss_scale_value` is not a number.
        ValueError: If `loss_scale_value` is not positive and finite.

    Example:
        >>> cell = FixedLossScaleUpdateCell(128.0)
        >>> scale = torch.full((), 128.0)
        >>> cell(scale, torch.ones((), dtype=torch.bool))
        tensor(True)
        >>> scale
        tensor(128.)
    """

    def __init__(self, loss_scale_value: float) -> None:
        super().__init__(loss_scale_value)

    def __call__(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        del loss_scale
        return overflow


@final
class DynamicLossScaleUpdateCell(WindowedCell):
    """Lower the loss scale on overflow, and raise it after many steps without overflow.

    - On overflow: ``scale = max(scale / scale_factor, min_loss_scale)``.
    - After `scale_window` consecutive steps without overflow: ``scale = scale * scale_factor``,
      unless the product is infinite.

    Source: MindSpore, ``nn.DynamicLossScaleUpdateCell``; `hysteresis` as in Megatron-LM.

    Args:
        loss_scale_value: Initial loss scale, > 0 and finite.
        scale_factor: Factor by which the scale grows, >= 1. On overflow the scale is multiplied by
            the reciprocal.
        scale_window: Number of consecutive steps without overflow before the scale grows, >= 1.
        hysteresis: Number of overflows after which the scale is lowered, counted since the last
            change of the scale, >= 1. With 1 every overflow lowers the scale. An overflow that
            leaves the scale unchanged still skips the update and restarts the window.
        min_loss_scale: Lower bound of the scale, > 0.

    Raises:
        TypeError: If an argument is not a number (`scale_window` and `hysteresis`: not an integer).
        ValueError: If a value is out of range.

    Example:
        >>> cell = DynamicLossScaleUpdateCell(1024.0, scale_factor=2, scale_window=2)
        >>> scale = torch.full((), cell.get_loss_scale())
        >>> for overflow in (False, False, True):
        ...     _ = cell(scale, torch.full((), overflow))
        ...     print(scale.item())
        1024.0
        2048.0
        1024.0
    """

    def __init__(
        self,
        loss_scale_value: float,
        scale_factor: float,
        scale_window: int,
        *,
        hysteresis: int = 1,
        min_loss_scale: float = 1.0,
    ) -> None:
        super().__init__(loss_scale_value, scale_factor, overflow_count=0)
        self.scale_window = check_int("scale_window", scale_window)
        self.hysteresis = check_int("hysteresis", hysteresis)
        self.min_loss_scale = check_positive_number("min_loss_scale", min_loss_scale, finite=True)

    @classmethod
    def from_grad_scaler(cls, grad_scaler: torch.amp.GradScaler) -> Self:
        """Build a cell with the scale, factors and interval of a torch gradient scaler.

        The cell's scale has a lower bound of 1.0; torch's scaler has no lower bound.

        Args:
            grad_scaler: Scaler to copy. Its current scale is read on the host, once.
        """
        cell = cls(
            grad_scaler.get_scale(),
            grad_scaler.get_growth_factor(),
            grad_scaler.get_growth_interval(),
        )
        cell._decrease_ratio = grad_scaler.get_backoff_factor()
        return cell

    @property
    def cur_iter(self) -> Tensor:
        """Number of the next call, counted from 1: shape ``()``, int64."""
        return self._counters["cur_iter"]

    @property
    def last_overflow_iter(self) -> Tensor:
        """Number of the last call that overflowed or ended a window: shape ``()``, int64."""
        return self._counters["last_overflow_iter"]

    def __call__(self, loss_scale: Tensor, overflow: Tensor) -> Tensor:
        self.to(loss_scale.device)
        flag = falls = as_flag(overflow)
        overflow_count = self._counters["overflow_count"]
        if self.hysteresis > 1:
            overflow_count.add_(flag)
            falls = flag & (overflow_count >= self.hysteresis)
        grows = self._change(
            loss_scale, flag, falls=falls, window=self.scale_window, lowest=self.min_loss_scale
        )
        if self.hysteresis > 1:
            overflow_count.masked_fill_(falls | grows, 0)
        return overflow


def as_flag(overflow: Tensor) -> Tensor:
    """Return the overflow flag as a bool tensor of shape ``()``."""
    flag = overflow if overflow.dim() == 0 else overflow.reshape(())
    return flag if flag.dtype == torch.bool else flag != 0
