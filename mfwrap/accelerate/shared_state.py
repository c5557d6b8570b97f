"""One loss scale and one average for the updates of several optimizers."""

from collections.abc import Callable
from typing import final

from torch import Tensor

from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.loss_scale.live import LossScale

__all__ = ["SharedAverage", "SharedLossScale"]


@final
class SharedLossScale:
    """The loss scale as each of several optimizers' updates sees it.

    Gradients that wait for another optimizer were made with the scale as it is. It therefore
    changes when no gradient is left unused, and then once, for the overflow of any.

    Args:
        loss_scale: The live loss scale.
        gradients_are_used: Whether no optimizer but the one being updated has unused gradients.
    """

    def __init__(self, loss_scale: LossScale, gradients_are_used: Callable[[], bool]) -> None:
        self._loss_scale = loss_scale
        self._gradients_are_used = gradients_are_used
        self._overflow: Tensor | None = None

    @property
    def value(self) -> Tensor:
        """Shape ``()``, float32, changed in place."""
        return self._loss_scale.value

    @property
    def is_one(self) -> bool:
        """Whether the scale is known to be 1 without asking the device."""
        return self._loss_scale.is_one

    def update(self, overflow: Tensor) -> Tensor:
        """Learn whether an update's gradients overflowed; return the flag."""
        self._overflow = overflow if self._overflow is None else self._overflow | overflow
        self.settle()
        return overflow

    def settle(self) -> None:
        """Let the update cell see what has gathered, unless gradients wait."""
        if self._overflow is not None and self._gradients_are_used():
            self._loss_scale.update(self._overflow)
            self._overflow = None

    def discard(self) -> None:
        """Forget what has gathered."""
        self._overflow = None


@final
class SharedAverage:
    """An average whose weights several optimizers update.

    It follows when each of them has done its update, or when one does its next.

    Args:
        ema: The average.
    """

    def __init__(self, ema: ExponentialMovingAverage) -> None:
        self._ema = ema
        self._num_parts = 0
        self._applied: dict[int, Tensor] = {}

    def part(self) -> "AveragePart":
        """Return the average as one more optimizer's update sees it."""
        self._num_parts += 1
        return AveragePart(self, self._num_parts - 1)

    @property
    def has_parts(self) -> bool:
        """Whether any optimizer's update is followed."""
        return self._num_parts > 0

    def refuse_inside_swap(self, method: str) -> None:
        """Raise ``RuntimeError`` if the averages are in the parameters."""
        self._ema.refuse_inside_swap(method)

    def gather(self, part: int, applied: Tensor) -> None:
        """Note an update of one optimizer; follow the weights when all have done theirs."""
        if part in self._applied:
            self._follow()
        self._applied[part] = applied
        if len(self._applied) == self._num_parts:
            self._follow()

    def _follow(self) -> None:
        first, *others = self._applied.values()
        self._applied = {}
        for applied in others:
            first = first | applied
        self._ema.update(first)

    def discard(self) -> None:
        """Forget what has gathered."""
        self._applied = {}


@final
class AveragePart:
    """A `SharedAverage` as one optimizer's update sees it."""

    def __init__(self, average: SharedAverage, part: int) -> None:
        self._average = average
        self._part = part

    def refuse_inside_swap(self, method: str) -> None:
        """Raise ``RuntimeError`` if the averages are in the parameters."""
        self._average.refuse_inside_swap(method)

    def update(self, applied: Tensor) -> None:
        """Note this optimizer's update."""
        self._average.gather(self._part, applied)
