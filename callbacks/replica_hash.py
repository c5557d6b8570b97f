"""Hashes that tell whether tensors are bitwise the same, without moving them."""

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["bitwise_hashes"]

_CHUNK = 2**20
_MULTIPLIER = 0x1E3779B97F4A7C15
"""Spreads positions over 64 bits: 2**64 over the golden ratio, made positive."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def bitwise_hashes(tensors: Sequence[Tensor]) -> Tensor:
    """Compute a hash of the bits of each tensor, reading each once.

    The sum modulo ``2**64`` of the elements' bits, each times an odd number of its position's own.
    One element that differs, in whatever bits, always gives another hash, because an odd number
    has an inverse; several do but for one case in about ``2**64``.

    Args:
        tensors: ``N`` dense tensors of any dtype, on one device, at least one.

    Returns:
        Shape ``(N,)``, int64, on that device. Does not wait for it.
    """
    return torch.stack([_hash(tensor.detach()) for tensor in tensors])


def _hash(tensor: Tensor) -> Tensor:
    real = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    bits = real.reshape(-1).view(_INTEGERS[real.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    for start in range(0, bits.numel(), _CHUNK):
        part = bits[start : start + _CHUNK]
        positions = torch.arange(start, start + part.numel(), device=tensor.device)
        total = total + (part.long() * (positions * _MULTIPLIER | 1)).sum()
    return total
