"""Measure each weight's updates by a sample of its elements."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from mfwrap.tensors.shards import local_tensors, on_device
from mfwrap.tensors.wrappers import unwrapped_optimizer

_SAMPLE = 256
"""Largest number of elements that are sampled of each weight."""

_OTHERS = 1.1
"""Ratio of an update with weight decay to one without, at most."""


class Change(NamedTuple):
    """Root mean squares of a sample of ``P`` weights; each of shape ``(P,)``, float32."""

    update: Tensor
    """Change of the weights in the step."""

    weight: Tensor
    """The weights before the update."""

    outside: Tensor | None
    """Change of the weights between the step before and this one; ``None`` if unknown."""

    def followed_by(self, other: "Change") -> "Change":
        """Return the change of two updates, as of two optimizers that have different weights."""
        outside = self.outside
        if outside is not None and other.outside is not None:
            outside = outside.hypot(other.outside)
        return Change(self.update.hypot(other.update), self.weight, outside)


@final
class UpdateSample:
    """Measure by how much each update changes each weight, from at most 256 elements of a weight.

    The elements are spread evenly over the weight. So a step reads 256 elements for each weight,
    whatever the size of the weights and of the optimizer's state; the root mean square is within
    about 5 % of that of all elements. No host-device synchronization.

    Args:
        weights: ``P`` weights, which may be sharded; a rank measures its own shards. Weights that
            do not occupy one block of memory, and empty shards, are measured as NaN.
    """

    def __init__(self, weights: Sequence[Tensor]) -> None:
        shards = local_tensors([weight.detach() for weight in weights])
        self._places = _places(weights)
        self._views = [_spread(shard) for shard in shards]
        self._device = shards[0].device if shards else torch.device("cpu")
        sizes = [view.numel() for view in self._views]
        self._sizes = torch.tensor(sizes, dtype=torch.int64).to(self._device)
        self._end = self._read()
        self._start: Tensor | None = None

    def is_of(self, weights: Sequence[Tensor]) -> bool:
        """Tell whether these are the weights that are measured, in the same memory."""
        return self._places == _places(weights)

    def begin(self) -> None:
        """Begin a step: what has changed since the last measurement is no update."""
        self._start = self._read()

    @torch.no_grad()
    def measure(self) -> "Change":
        """Measure the change of the weights since `begin`, or since the last measurement."""
        start = self._end if self._start is None else self._start
        end = self._read()
        parts = [(end - start).square(), start.square()]
        if self._start is not None:
            # What was non-finite and stays so has not changed.
            same = (start == self._end) | (start.isnan() & self._end.isnan())
            parts.append(torch.where(same, 0.0, start - self._end).square())
        self._end, self._start = end, None
        squares = torch.stack(parts, dim=1)
        if not len(self._sizes):
            return Change(*[squares.new_zeros(0)] * 3)
        # Without `unsafe`, torch reads the lengths on the host to check them.
        sums = torch.segment_reduce(
            squares, "sum", lengths=self._sizes, axis=0, unsafe=True, initial=0.0
        )
        found = (sums / self._sizes[:, None]).sqrt().unbind(dim=1)
        if len(found) < 3:
            return Change(found[0], found[1], None)
        # What cannot be sampled is not known to have changed.
        return Change(found[0], found[1], torch.where(self._sizes > 0, found[2], 0.0))

    def _read(self) -> Tensor:
        if not self._views:
            return torch.zeros(0)
        # Some types, such as those of 8 bits, are not joined with others.
        return torch.cat([on_device(view, self._device).float() for view in self._views])


def ordinary_update(optimizer: Any) -> float:
    """Return the largest root mean square of an ordinary update of Adam, divided by the rate.

    A row of an embedding, or an expert, that had no gradient for a while gets an update of up to
    ``(1 - beta1) / sqrt(1 - beta2)`` times the rate from its next one, and of the rate itself from
    its first ones. Such an update may be far above the usual ones.

    Args:
        optimizer: Optimizer with or without wrappers; ``None`` if unknown.

    Returns:
        0 if it is no optimizer of Adam's kind.
    """
    inner = unwrapped_optimizer(optimizer)
    found = 0.0
    for group in getattr(inner, "param_groups", ()):
        betas = group.get("betas")
        # Betas may be tensors on the device, which must not be read.
        known = isinstance(betas, tuple) and [each for each in betas if type(each) is float]
        if "eps" not in group or not known or len(known) != 2:
            return 0.0
        first, second = known
        if not (0 <= first < 1 and 0 <= second < 1):
            return 0.0
        found = max(found, 1.0, (1 - first) / math.sqrt(1 - second))
    return _OTHERS * found


def _places(weights: Sequence[Tensor]) -> list[tuple[int, int]]:
    return [(each.data_ptr(), each.numel()) for each in local_tensors(list(weights))]


def _spread(tensor: Tensor) -> Tensor:
    """Return a view of elements that are spread over a tensor, shape ``(n,)``."""
    # In the order of its memory, a weight in the format channels_last is contiguous, too.
    strides = tensor.stride()
    ordered = tensor.permute(sorted(range(tensor.dim()), key=lambda dim: -strides[dim]))
    if not ordered.is_contiguous():
        return tensor.new_zeros(0)
    # An odd distance meets all columns of a matrix with an even number of them.
    distance = -(-tensor.numel() // _SAMPLE) | 1
    return ordered.view(-1)[::distance]
