"""MindSpore's loss-scale managers: rules whose state is Python numbers on the host."""

import abc
import sys
from typing import final

from torch import Tensor

from mfwrap.arguments import check_bool, check_int, described
from mfwrap.loss_scale.cells import (
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    LossScaleUpdateCell,
    check_factor,
)

__all__ = ["DynamicLossScaleManager", "FixedLossScaleManager", "LossScaleManager"]

_MAX_CONSECUTIVE_OVERFLOWS = 1000


class LossScaleManager(abc.ABC):
    """Base of the managers: a loss scale, its rule, and the update cell of the same rule.

    A loop of one's own reads `get_loss_scale` and calls `update_loss_scale`; a training cell takes
    `get_update_cell` as its ``scale_sense`` and goes on by itself.

    Source: MindSpore, ``amp.LossScaleManager``.
    """

    @abc.abstractmethod
    def get_loss_scale(self) -> float:
        """Return the loss scale, with which the next loss is multiplied."""

    @abc.abstractmethod
    def update_loss_scale(self, overflow: bool | Tensor) -> None:  # noqa: FBT001  (MindSpore's signature)
        """Change the loss scale after a step.

        Args:
            overflow: Whether the gradients of the step were not finite. A tensor is read on the
                host, which waits for its device.
        """

    @abc.abstractmethod
    def get_update_cell(self) -> LossScaleUpdateCell | None:
        """Return a new cell that goes on from the loss scale as it is, on the device."""

    def get_drop_overflow_update(self) -> bool:
        """Return whether an update is dropped when its gradients overflow."""
        return True


@final
class FixedLossScaleManager(LossScaleManager):
    """A loss scale that stays.

    Source: MindSpore, ``amp.FixedLossScaleManager``.

    Args:
        loss_scale: >= 1 and finite.
        drop_overflow_update: What `get_drop_overflow_update` returns. With False there is no
            update cell: a step that applies overflowing updates, too, is
            ``TrainOneStepCell(network, optimizer, sens=manager.get_loss_scale())``, whose
            gradients stay multiplied.

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
        self._loss_scale = check_scale("loss_scale", loss_scale)
        self._drop_overflow_update = check_bool("drop_overflow_update", drop_overflow_update)

    def get_loss_scale(self) -> float:
        return self._loss_scale

    def update_loss_scale(self, overflow: bool | Tensor) -> None:  # noqa: FBT001  (MindSpore's signature)
        """Do nothing."""

    def get_update_cell(self) -> FixedLossScaleUpdateCell | None:
        """Return a cell of the loss scale; ``None`` with ``drop_overflow_update=False``."""
        return FixedLossScaleUpdateCell(self._loss_scale) if self._drop_overflow_update else None

    def get_drop_overflow_update(self) -> bool:
        return self._drop_overflow_update


@final
class DynamicLossScaleManager(LossScaleManager):
    """Lower the loss scale on overflow, raise it after a row of finite steps.

    Overflow: ``max(loss_scale / scale_factor, 1)``. Every `scale_window` steps in a row without
    overflow: ``loss_scale * scale_factor``, unless that is not finite.

    Source: MindSpore, ``amp.DynamicLossScaleManager``.

    Args:
        init_loss_scale: Initial loss scale, >= 1 and finite; an int stays one until it falls.
        scale_factor: >= 1. (MindSpore takes any above 0; below 1 an overflow would raise the
            scale.)
        scale_window: Steps in a row without overflow after which the scale grows, >= 1.

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
        self.loss_scale = check_scale("init_loss_scale", init_loss_scale)
        """The loss scale as it is."""
        check_factor(scale_factor)
        self.scale_factor = scale_factor
        self.scale_window = check_int("scale_window", scale_window)
        self.increase_ratio = scale_factor
        """What the loss scale is multiplied by when it grows."""
        self.decrease_ratio = 1 / scale_factor
        """What the loss scale is multiplied by when it falls."""
        self.bad_step_max = _MAX_CONSECUTIVE_OVERFLOWS
        """Overflows in a row that are borne."""
        self.cur_iter = 1
        """Number of the next update, from 1."""
        self.last_overflow_iter = 0
        """Last update that overflowed, 0 for none."""
        self.bad_step = 0
        """Overflows in a row."""

    def get_loss_scale(self) -> float:
        return self.loss_scale

    def update_loss_scale(self, overflow: bool | Tensor) -> None:  # noqa: FBT001  (MindSpore's signature)
        """Change the loss scale after a step.

        Args:
            overflow: Whether the gradients of the step were not finite. A tensor is read on the
                host, which waits for its device.

        Raises:
            RuntimeError: If more than 1000 updates in a row overflowed; the scale has fallen.
        """
        if overflow:
            # The product with the reciprocal, not a quotient: MindSpore's exact number.
            self.loss_scale = max(self.loss_scale * self.decrease_ratio, 1)
            self.last_overflow_iter = self.cur_iter
            self.bad_step += 1
            self._check_overflows()
        else:
            if (self.cur_iter - self.last_overflow_iter) % self.scale_window == 0:
                grown = self.loss_scale * self.increase_ratio
                self.loss_scale = grown if grown <= sys.float_info.max else self.loss_scale
            self.bad_step = 0
        self.cur_iter += 1

    def _check_overflows(self) -> None:
        if self.bad_step > self.bad_step_max:
            msg = (
                f"{self.bad_step} updates in a row overflowed, more than "
                f"{self.bad_step_max}, the last one at update {self.cur_iter} with loss "
                f"scale {self.loss_scale:g} left; find what is not finite before going on"
            )
            raise RuntimeError(msg)

    def get_update_cell(self) -> DynamicLossScaleUpdateCell:
        return DynamicLossScaleUpdateCell(self.loss_scale, self.scale_factor, self.scale_window)


def check_scale(name: str, value: float) -> float:
    """Return `value` unchanged.

    Raises:
        TypeError: If it is not an int or float.
        ValueError: If it is < 1 or not finite.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        msg = f"`{name}` must be a number, got {described(value)}"
        raise TypeError(msg)
    if not 1 <= value <= sys.float_info.max:
        msg = f"`{name}` must be >= 1 and finite, got {value}"
        raise ValueError(msg)
    return value
