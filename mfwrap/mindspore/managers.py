"""MindSpore's loss-scale managers, which keep the loss scale as a Python number on the host."""

import abc
import sys
from typing import final

from torch import Tensor

from mfwrap.arguments import check_bool, check_int, check_number
from mfwrap.loss_scale.cells import (
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    LossScaleUpdateCell,
)


class LossScaleManager(abc.ABC):
    """Base class of the managers: hold a loss scale, and the rule that changes it.

    In your own training loop, multiply the loss by ``manager.get_loss_scale()`` and call
    `update_loss_scale` after each step. For a training cell, pass ``manager.get_update_cell()`` as
    ``scale_sense``: the cell then applies the same rule on the device.

    Source: MindSpore, ``amp.LossScaleManager``.
    """

    @abc.abstractmethod
    def get_loss_scale(self) -> float:
        """Return the loss scale, the factor by which to multiply the next loss."""

    @abc.abstractmethod
    def update_loss_scale(self, overflow: bool | Tensor) -> None:  # noqa: FBT001  (MindSpore's signature)
        """Change the loss scale after a step.

        Args:
            overflow: Whether the gradients of the step were non-finite. A tensor is read on the
                host, which synchronizes with its device.
        """

    @abc.abstractmethod
    def get_update_cell(self) -> LossScaleUpdateCell | None:
        """Return a new update cell that starts from the current loss scale."""

    def get_drop_overflow_update(self) -> bool:
        """Return whether an update with non-finite gradients is skipped."""
        return True


@final
class FixedLossScaleManager(LossScaleManager):
    """Keep the loss scale fixed.

    Source: MindSpore, ``amp.FixedLossScaleManager``.

    Args:
        loss_scale: The loss scale, >= 1 and finite.
        drop_overflow_update: Whether updates with non-finite gradients are skipped. With False
            there is no update cell; use
            ``TrainOneStepCell(network, optimizer, sens=manager.get_loss_scale())``, which applies
            every update and leaves the gradients multiplied by the loss scale.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If `loss_scale` is out of range.

    Example:
        >>> manager = FixedLossScaleManager(1024.0)
        >>> manager.get_update_cell().get_loss_scale()
        1024.0
    """

    def __init__(
        self,
        loss_scale: float = 128.0,
        drop_overflow_update: bool = True,  # noqa: FBT001, FBT002  (MindSpore's signature)
    ) -> None:
        check_number("loss_scale", loss_scale, minimum=1)
        self._loss_scale = loss_scale
        self._drop_overflow_update = check_bool("drop_overflow_update", drop_overflow_update)

    def get_loss_scale(self) -> float:
        return self._loss_scale

    def update_loss_scale(self, overflow: bool | Tensor) -> None:  # noqa: FBT001  (MindSpore's signature)
        """Do nothing."""

    def get_update_cell(self) -> FixedLossScaleUpdateCell | None:
        """Return a new update cell with this loss scale; ``None`` if overflows are not skipped."""
        return FixedLossScaleUpdateCell(self._loss_scale) if self._drop_overflow_update else None

    def get_drop_overflow_update(self) -> bool:
        return self._drop_overflow_update


@final
class DynamicLossScaleManager(LossScaleManager):
    """Lower the loss scale on overflow, and raise it after enough steps without overflow.

    - On overflow: ``max(loss_scale / scale_factor, 1)``.
    - After every `scale_window` consecutive steps without overflow: ``loss_scale * scale_factor``,
      unless the product is infinite.

    Source: MindSpore, ``amp.DynamicLossScaleManager``.

    Args:
        init_loss_scale: Initial loss scale, >= 1 and finite. An int stays an int until the scale
            falls.
        scale_factor: Factor by which the scale grows and falls, >= 1. (MindSpore also accepts
            factors between 0 and 1, with which an overflow would raise the scale.)
        scale_window: Number of consecutive steps without overflow before the scale grows, >= 1.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If an argument is out of range.

    Example:
        >>> manager = DynamicLossScaleManager(1024, scale_factor=2, scale_window=2)
        >>> for overflow in (False, False, True):
        ...     manager.update_loss_scale(overflow)
        ...     print(manager.get_loss_scale())
        1024
        2048
        1024.0
    """

    def __init__(
        self, init_loss_scale: float = 2**24, scale_factor: float = 2, scale_window: int = 2000
    ) -> None:
        check_number("init_loss_scale", init_loss_scale, minimum=1)
        check_number("scale_factor", scale_factor, minimum=1)
        self.loss_scale = init_loss_scale
        """Current loss scale."""
        self.scale_factor = scale_factor
        self.scale_window = check_int("scale_window", scale_window)
        self.increase_ratio = scale_factor
        """Factor of the loss scale when it grows."""
        self.decrease_ratio = 1 / scale_factor
        """Factor of the loss scale when it falls."""
        self.bad_step_max = 1000
        """Number of consecutive overflows that are tolerated."""
        self.cur_iter = 1
        """Number of the next update, counted from 1."""
        self.last_overflow_iter = 0
        """Last update that overflowed; 0 before the first overflow."""
        self.bad_step = 0
        """Number of consecutive overflows so far."""

    def get_loss_scale(self) -> float:
        return self.loss_scale

    def update_loss_scale(self, overflow: bool | Tensor) -> None:  # noqa: FBT001  (MindSpore's signature)
        """Change the loss scale after a step.

        Args:
            overflow: Whether the gradients of the step were non-finite. A tensor is read on the
                host, which synchronizes with its device.

        Raises:
            RuntimeError: If more than 1000 consecutive updates have overflowed. The scale has been
                lowered for the last overflow, too.
        """
        if overflow:
            # MindSpore multiplies by the reciprocal; dividing would give a different last bit.
            self.loss_scale = max(self.loss_scale * self.decrease_ratio, 1)
            self.last_overflow_iter = self.cur_iter
            self.bad_step += 1
            if self.bad_step > self.bad_step_max:
                msg = (
                    f"{self.bad_step} updates in a row overflowed, more than "
                    f"{self.bad_step_max}, and after update {self.cur_iter} the loss scale is "
                    f"{self.loss_scale:g}; find out what is non-finite before you continue"
                )
                raise RuntimeError(msg)
        else:
            if (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                grown = self.loss_scale * self.increase_ratio
                self.loss_scale = grown if grown <= sys.float_info.max else self.loss_scale
            self.bad_step = 0
        self.cur_iter += 1

    def get_update_cell(self) -> DynamicLossScaleUpdateCell:
        return DynamicLossScaleUpdateCell(self.loss_scale, self.scale_factor, self.scale_window)
