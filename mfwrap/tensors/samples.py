"""A hash of a few elements of each tensor of a network, which tells whether it is another one."""

import contextlib
import hashlib
import itertools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from mfwrap.tensors.shards import local_tensors

_NUM_ELEMENTS = 16
"""Elements of each tensor that are read."""


def tensors_of(network: nn.Module) -> Iterable[Tensor]:
    """Return the parameters and the buffers of a network."""
    return itertools.chain(network.parameters(), network.buffers())


@torch.no_grad()
def sampled_hash(tensors: Iterable[Tensor]) -> str:
    """Return a hash of a few evenly spaced elements of each tensor, and of the tensors' shapes.

    A step of a training changes most elements, so it changes the hash; a change of a few elements
    may not. The hash is the same on any device. Synchronizes with the device.

    Args:
        tensors: Tensors of any dtype. Of a sharded tensor, this rank's shard counts. Of a tensor
            whose elements cannot be read, as on the device ``"meta"``, only the shape counts.
    """
    found = hashlib.sha256()
    for tensor in local_tensors(tensors):
        found.update(repr(tuple(tensor.shape)).encode())
        # A quantized tensor may refuse to be read in parts, with an error of any of these kinds.
        with contextlib.suppress(NotImplementedError, RuntimeError, TypeError):
            flat = tensor.detach().reshape(-1)
            few = flat[:: max(1, flat.numel() // _NUM_ELEMENTS)][:_NUM_ELEMENTS]
            found.update(bytes(few.contiguous().view(torch.uint8).tolist()))
    return found.hexdigest()
