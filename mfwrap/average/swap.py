"""Hold averages in a model in place of its weights, and lift them while somebody reads these."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import final

import torch
from torch import Tensor

from mfwrap.average.tensors import write

_swaps: "list[Swap]" = []
"""The swaps whose averages are in a model now, in the order in which they began."""


@contextlib.contextmanager
def training_weights(*, leaves_nested: bool = False) -> Iterator[None]:
    """Inside the block, have the weights of the training in each model, not averages.

    Code that reads weights of a training, and may run while averages are swapped in for an
    evaluation, reads them in such a block. It restores what each `ExponentialMovingAverage.swap`
    has replaced, and puts the averages back afterwards, both bitwise. Without a swap it does
    nothing. It starts no collective and does not synchronize with the device.

    Args:
        leaves_nested: Whether averages stay in a model if one block of ``swap`` is inside another.

    Example:
        >>> import torch
        >>> from mfwrap import ExponentialMovingAverage
        >>> from mfwrap.average.swap import training_weights
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> _ = torch.nn.init.zeros_(model.weight)
        >>> ema = ExponentialMovingAverage(model, decay=0.75)
        >>> _ = torch.nn.init.ones_(model.weight)
        >>> with ema.swap(), training_weights():
        ...     model.weight.item()
        1.0
    """
    with contextlib.ExitStack() as lifted:
        # The last swap may have replaced averages of an earlier one, so it is lifted first.
        for swap in reversed(list(_swaps)):
            if not (leaves_nested and swap.num_nested):
                lifted.enter_context(swap.lifted())
        yield


@final
class Swap:
    """Keep the values of weights and buffers, bitwise, while averages are in their place.

    Args:
        weights: Weights of the model. Their values are kept at construction.
        buffers: Returns the buffers of the model.
        reshard: Frees whole weights that a sharded model has gathered. Called before and after
            values are written.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        buffers: Callable[[], Sequence[Tensor]],
        reshard: Callable[[], None],
    ) -> None:
        self._weights = weights
        self._buffers = buffers
        self._reshard = reshard
        reshard()
        self._kept = self._present()
        self._is_over = False
        self.num_nested = 0
        """Number of further blocks of the average's ``swap`` inside the one that began this."""
        self.is_in = True
        """Whether the averages are in the model now; false in a block of `training_weights`."""
        _swaps.append(self)

    def end(self) -> None:
        """Restore the values. In a block of `training_weights`, leave the present values."""
        if self.is_in:
            self._lift()
        self._is_over = True

    @contextlib.contextmanager
    def nested(self) -> Iterator[None]:
        """Count a block of ``swap`` that is inside the block that began this swap."""
        self.num_nested += 1
        try:
            yield
        finally:
            self.num_nested -= 1

    @contextlib.contextmanager
    def lifted(self) -> Iterator[None]:
        """Inside the block, have the kept values in the model.

        Values that are written inside the block stay when the swap ends. If the swap ends inside
        the block, the averages are not put back.
        """
        averages = self._present()
        self._lift()
        try:
            yield
        finally:
            if not self._is_over:
                self._kept = self._present()
                self._write(averages)
                self.is_in = True
                _swaps.append(self)

    def _lift(self) -> None:
        self._write(self._kept)
        self.is_in = False
        _swaps.remove(self)

    @torch.no_grad()
    def _present(self) -> tuple[list[Tensor], list[Tensor]]:
        return [each.clone() for each in self._weights], [each.clone() for each in self._buffers()]

    def _write(self, values: tuple[list[Tensor], list[Tensor]]) -> None:
        self._reshard()
        for targets, sources in zip((self._weights, self._buffers()), values, strict=True):
            write(targets, sources)
        self._reshard()
