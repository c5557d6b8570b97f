"""Fingerprints of tensors on the device: exact hashes, and sketches that show distances.

Two tensors have the same hash only if they have the same bits. A sketch holds a few sums of all
elements with random signs. The mean squared difference of two tensors' sums estimates the squared
distance between the tensors: the signs of two elements agree as often as not, so mixed products
cancel on average, and squares stay (Alon, Matias and Szegedy 1996).

Both are sums over the elements, and depend on an element's value and on its position in the whole
tensor. So the fingerprints of shards add up to the fingerprint of the whole tensor, and no rank
needs to send anything.
"""

import functools
from collections.abc import Callable, Sequence
from itertools import groupby

import torch
from torch import Tensor
from torch.nn import functional

from mfwrap.tensors.shards import on_device

NUM_SKETCHES = 4
"""Sums with random signs per tensor. The error of an estimated distance is about 35 %."""

NUM_VALUES = 5 + NUM_SKETCHES
"""Numbers per tensor in the result of `fingerprints`."""

_BLOCK = 2**20
"""Elements that are read at once. Smaller tensors of equal size are read together, because a
network has hundreds of them and launching a kernel on a GPU takes microseconds."""

_PERIOD = 2**12
"""Elements whose signs in a sketch are independent."""

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def bitwise_hashes(tensors: Sequence[Tensor], starts: Sequence[int] | None = None) -> Tensor:
    """Hash the bits of each tensor, reading each tensor once.

    The bits of each element are read as an integer and multiplied by a random odd number that
    belongs to the element's position. The hash is the sum of these products modulo ``2**64``. A
    change of one element always changes the hash, because an odd number has an inverse modulo
    ``2**64``. A change of several elements goes unnoticed with a probability of about ``2**-64``.

    Args:
        tensors: ``N`` >= 1 dense tensors of any dtype.
        starts: Position of the first element of each tensor; 0 by default. A shard that is a
            contiguous part of a flattened tensor starts at its offset in that tensor. A complex
            number counts as two elements.

    Returns:
        Shape ``(N,)``, int64, on the first tensor's device, without host-device synchronization.
    """
    return torch.stack(_sums([_bits(t.detach()) for t in tensors], starts, _hashes_of_rows))


@torch.no_grad()
def row_hashes(tensor: Tensor) -> Tensor:
    """Hash the bits of each row of a tensor, which has at least one dimension.

    Returns:
        Shape ``(len(tensor),)``, int64, without host-device synchronization.
    """
    bits = _bits(tensor.detach())
    num_rows = len(tensor)
    return _sum(bits.view(num_rows, bits.numel() // max(num_rows, 1)), 0, _hashes_of_rows)


@torch.no_grad()
def fingerprints(tensors: Sequence[Tensor], starts: Sequence[int] | None = None) -> Tensor:
    """Return hash, squared norm and sketch of each tensor, reading each tensor twice.

    Args:
        tensors: ``N`` >= 1 dense tensors of any dtype.
        starts: Position of the first element of each tensor; see `bitwise_hashes`.

    Returns:
        Shape ``(N, NUM_VALUES)``, float32: the hash in four columns of 16 bits each, the lowest
        first, then the squared L2 norm, then the sketch. On the first tensor's device, without
        host-device synchronization.
    """
    values = [_real(tensor.detach()).reshape(-1) for tensor in tensors]
    squares_and_sketches = torch.stack(_sums(values, starts, _sketches_of_rows))
    return torch.cat([as_floats(bitwise_hashes(tensors, starts)), squares_and_sketches], dim=1)


def as_floats(hashes: Tensor) -> Tensor:
    """Split hashes of shape ``(N,)`` into float32 of shape ``(N, 4)``, 16 bits each, exactly."""
    return torch.stack([hashes >> shift & 0xFFFF for shift in (0, 16, 32, 48)], dim=1).float()


def _sums(
    flat: Sequence[Tensor],
    starts: Sequence[int] | None,
    sum_of_rows: Callable[[Tensor, int], Tensor],
) -> list[Tensor]:
    """Return the sum over the elements of each tensor.

    Args:
        flat: Bits or values of each tensor, one-dimensional.
        starts: Position of the first element of each tensor; 0 by default.
        sum_of_rows: Called with elements of several tensors, shape ``(tensors, elements)``, and the
            position of the first column. All columns belong to one block of `_BLOCK` positions.
    """
    first = [0] * len(flat) if starts is None else starts

    def kind(index: int) -> tuple[str, str, int, int]:
        tensor = flat[index]
        return str(tensor.device), str(tensor.dtype), tensor.numel(), first[index]

    results: list[Tensor] = list(flat)
    for (*_, size, start), members in groupby(sorted(range(len(flat)), key=kind), kind):
        indices = list(members)
        at_once = max(_BLOCK // max(size, 1), 1)
        for begin in range(0, len(indices), at_once):
            together = indices[begin : begin + at_once]
            rows = torch.stack([flat[index] for index in together])
            total = on_device(_sum(rows, start, sum_of_rows), flat[0].device)
            for index, result in zip(together, total.unbind(), strict=True):
                results[index] = result
    return results


def _sum(rows: Tensor, start: int, sum_of_rows: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Add up `sum_of_rows` over blocks of positions; the first column has position `start`."""
    borders = range(_BLOCK - start % _BLOCK, rows.shape[1], _BLOCK)
    first, *others = rows.tensor_split(list(borders), dim=1)
    total = sum_of_rows(first, start)
    for border, piece in zip(borders, others, strict=True):
        total = total + sum_of_rows(piece, start + border)
    return total


def _real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


def _bits(tensor: Tensor) -> Tensor:
    real = _real(tensor)
    return real.reshape(-1).view(_INTEGERS[real.element_size()])


def _hashes_of_rows(bits: Tensor, start: int) -> Tensor:
    column = start % _BLOCK
    factors = _odd_numbers(bits.device)[column : column + bits.shape[1]]
    sums = (bits * factors).sum(dim=1)  # in int64, as the factors
    # Consecutive integers as factors would not do: their multiples cancel in sums of few terms.
    return sums * _signed(_mixed(start // _BLOCK) | 1)


def _sketches_of_rows(values: Tensor, start: int) -> Tensor:
    """Return squared norm and sketch of each row, shape ``(rows, 1 + NUM_SKETCHES)``."""
    columns, blocks = _signs(values.device)
    before = start % _PERIOD
    num_blocks = max(-(-(before + values.shape[1]) // _PERIOD), 1)
    after = num_blocks * _PERIOD - before - values.shape[1]
    padded = functional.pad(values.float(), (before, after))
    folded = padded.view(len(values), num_blocks, _PERIOD)
    # An element's sign is the product of two signs, of its column and of its block. Any two
    # elements differ in one of them, so the product of their signs is random.
    block = torch.arange(num_blocks, device=values.device) + start // _PERIOD
    sums = (folded @ columns * blocks[block % _PERIOD]).sum(dim=1)
    return torch.cat([padded.square().sum(dim=1, keepdim=True), sums], dim=1)


@functools.cache
def _odd_numbers(device: torch.device) -> Tensor:
    """Return a random odd number for each position in a block, shape ``(_BLOCK,)``, int64.

    The numbers are a hash of the position (SplitMix64), so they are the same on every device and in
    every version of torch.
    """
    return _mixed_tensor(torch.arange(_BLOCK, device=device)) | 1


@functools.cache
def _signs(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return signs of columns and of blocks, shape ``(_PERIOD, NUM_SKETCHES)`` each."""
    mixed = _mixed_tensor(torch.arange(_BLOCK, _BLOCK + 2 * _PERIOD, device=device))
    bits = mixed[:, None] >> torch.arange(40, 40 + NUM_SKETCHES, device=device) & 1
    columns, blocks = (1 - 2 * bits).float().chunk(2)
    return columns, blocks


_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_LAST_SHIFT = 31


def _mixed(number: int) -> int:
    """Return SplitMix64's output for a state of ``number`` increments, from 0 to ``2**64 - 1``."""
    mixed = (number + 1) * _GAMMA % 2**64
    for shift, multiplier in _MULTIPLIERS:
        mixed = (mixed ^ mixed >> shift) * multiplier % 2**64
    return mixed ^ mixed >> _LAST_SHIFT


def _mixed_tensor(numbers: Tensor) -> Tensor:
    """Return `_mixed` of each element, in two's complement."""
    mixed: Tensor = (numbers + 1) * _signed(_GAMMA)
    for shift, multiplier in _MULTIPLIERS:
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(multiplier)
    return mixed ^ _shifted(mixed, _LAST_SHIFT)


def _shifted(numbers: Tensor, shift: int) -> Tensor:
    """Shift right and fill with zeros; torch's ``>>`` fills with the sign bit."""
    return (numbers >> shift).bitwise_and(2 ** (64 - shift) - 1)


def _signed(number: int) -> int:
    """Return a 64-bit number in two's complement."""
    return number - 2**64 if number >= 2**63 else number
