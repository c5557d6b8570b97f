"""Notice whether gradients have changed since they were seen, without reading them."""

import operator
import weakref
from collections.abc import Sequence
from typing import final

from torch import Tensor

from mfwrap.tensors.shards import local_tensors


@final
class SeenGradients:
    """Remember which gradients there were, and how often each had been written to.

    An ``id`` cannot identify a gradient: a new one often gets the address of a released one. A weak
    reference can, and does not keep the gradient's memory. The references are only compared: torch
    may have given up the Python object of a tensor that is otherwise alive.

    Args:
        gradients: Gradients that are present.
    """

    def __init__(self, gradients: Sequence[Tensor] = ()) -> None:
        self._references = list(map(weakref.ref, gradients))
        self._versions = _versions(gradients)

    def __bool__(self) -> bool:
        return bool(self._references)

    def are(self, gradients: Sequence[Tensor]) -> bool:
        """Return whether `gradients` are the same tensors, and nothing has written to them."""
        return (
            len(gradients) == len(self._references)
            and all(map(operator.is_, gradients, [seen() for seen in self._references]))
            and self._versions == _versions(gradients)
        )


def _versions(gradients: Sequence[Tensor]) -> list[int]:
    # A write to a DTensor's shard does not increase the DTensor's version, so take the versions of
    # the shards.
    return [local._version for local in local_tensors(gradients)]
