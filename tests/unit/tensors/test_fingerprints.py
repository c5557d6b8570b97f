"""Hashes agree with exact arithmetic, and sketches show distances, however a tensor is divided."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.tensors import fingerprints as module
from mfwrap.tensors.fingerprints import (
    NUM_VALUES,
    as_floats,
    bitwise_hashes,
    fingerprints,
    row_hashes,
)

MODULUS = 2**64
DTYPES = [
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.bool),
    *(torch.complex64, torch.int64),
]


def split_mix(state: int) -> int:
    """Return the next output of the generator SplitMix64, by its published definition."""
    state = (state + 0x9E3779B97F4A7C15) % MODULUS
    state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % MODULUS
    state = (state ^ (state >> 27)) * 0x94D049BB133111EB % MODULUS
    return state ^ (state >> 31)


def factor(position: int, block: int) -> int:
    """Return the odd number of a position."""
    gamma = 0x9E3779B97F4A7C15
    in_block, number = position % block, position // block
    first, second = (split_mix(gamma * each % MODULUS) | 1 for each in (in_block, number))
    return first * second


def plain_hash(tensor, block=2**20) -> int:
    """Return the hash of a tensor, computed with Python's unbounded integers."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = real.contiguous().reshape(-1).view(sizes[real.element_size()]).tolist()
    total = sum(bit * factor(position, block) for position, bit in enumerate(bits))
    return (total + MODULUS // 2) % MODULUS - MODULUS // 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_hashes(dtype, monkeypatch):
    """Hashes agree with exact integer arithmetic, for every dtype and layout, also in blocks."""
    tensors = [
        (torch.randn(5, 7) * 50).to(dtype),
        (torch.randn(7, 5) * 50).to(dtype).t(),
        torch.ones(()).to(dtype),
        torch.ones(0).to(dtype),
    ]

    assert bitwise_hashes(tensors).tolist() == [plain_hash(tensor) for tensor in tensors]
    monkeypatch.setattr(module, "_BLOCK", 4)
    assert bitwise_hashes(tensors).tolist() == [plain_hash(tensor, 4) for tensor in tensors]


@given(index=st.integers(0, 99), bit=st.integers(0, 31), seed=st.integers(0, 9))
def test_a_flipped_bit(index, bit, seed):
    """Flipping any bit, or swapping two elements, changes the hash."""
    torch.manual_seed(seed)
    tensor = torch.randn(100)
    flipped, exchanged = tensor.clone(), tensor.clone()
    # Bit 31 is the sign bit of an int32. Its mask, 1 << 31, is too large for an int32, so use
    # -(2**31), which has only this bit set.
    flipped.view(torch.int32)[index] ^= (1 << bit) if bit < 31 else -(2**31)
    exchanged[[index, (index + 1) % 100]] = exchanged[[(index + 1) % 100, index]]
    hashes = bitwise_hashes([tensor, flipped, exchanged]).tolist()

    assert len(set(hashes)) == 3


@given(
    position=st.integers(0, 199),
    stride=st.integers(1, 200).map(lambda each: 2 * each),
    change=st.integers(-50, 50).filter(bool),
)
def test_changes_that_cancel_in_arithmetic_progressions(position, stride, change):
    """Changes by d, -2d and d at equal distances change the hash: tokens often move like this."""
    tokens = torch.full((1000,), 100)
    changed = tokens.clone()
    for number, factor_of_change in enumerate((1, -2, 1)):
        changed[position + number * stride] += factor_of_change * change
    first, second = bitwise_hashes([tokens, changed]).tolist()

    assert first != second


def test_zeros_of_both_signs():
    """Positive and negative zeros have different hashes."""
    first, second = bitwise_hashes([torch.zeros(2), -torch.zeros(2)]).tolist()

    assert first != second


def test_rows():
    """A row has the hash of a tensor with its content; rows may have any shape, or be none."""
    tensor = torch.randn(4, 3, 2)

    assert row_hashes(tensor).tolist() == bitwise_hashes(list(tensor)).tolist()
    assert row_hashes(torch.tensor([1, 2])).shape == (2,)
    assert row_hashes(torch.zeros(0, 3)).shape == (0,)
    assert row_hashes(torch.zeros(3, 0)).tolist() == [0, 0, 0]


@given(cut=st.integers(0, 60), block=st.sampled_from([4, 16, 2**20]), seed=st.integers(0, 9))
def test_parts_add_up(cut, block, seed):
    """The fingerprints of two parts of a tensor add up to its own, wherever it is cut."""
    torch.manual_seed(seed)
    tensor = torch.randn(60).bfloat16()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_BLOCK", block)
        patch.setattr(module, "_PERIOD", 8)
        module._odd_numbers.cache_clear()
        module._signs.cache_clear()
        parts = [tensor, tensor[:cut], tensor[cut:]]
        hashes = bitwise_hashes(parts, [0, 0, cut]).tolist()
        whole, *halves = fingerprints(parts, [0, 0, cut])[:, 4:]
        module._odd_numbers.cache_clear()
        module._signs.cache_clear()

    assert (hashes[1] + hashes[2] - hashes[0]) % MODULUS == 0
    torch.testing.assert_close(halves[0] + halves[1], whole)


def test_distances():
    """Sketches estimate the distance of two tensors without bias, and exactly for one element."""
    ratios = []
    for seed in range(100):
        generator = torch.Generator().manual_seed(seed)
        tensor = torch.randn(60, 50, generator=generator)
        noise = torch.randn(60, 50, generator=generator) * 0.01
        first, second = fingerprints([tensor, tensor + noise])[:, 5:]
        ratios.append(((first - second).square().mean() / noise.square().sum()).item())
    one = torch.zeros(60, 50)
    one[4, 5] = 3.0
    sketches = fingerprints([torch.zeros(60, 50), one])[:, 4:]

    assert np.mean(ratios) == pytest.approx(1, abs=0.2)
    assert min(ratios) > 0.05
    assert sketches[1].abs().tolist() == [9, 3, 3, 3, 3]


def test_values():
    """Fingerprints have the hash in exact pieces of 16 bits, then the squared norm."""
    tensor = torch.randn(3, 4)
    [row] = fingerprints([tensor]).tolist()
    [hash_] = bitwise_hashes([tensor]).tolist()

    assert len(row) == NUM_VALUES
    assert sum(int(piece) << 16 * i for i, piece in enumerate(row[:4])) == hash_ % MODULUS
    assert row[4] == pytest.approx(tensor.square().sum().item())
    assert as_floats(torch.tensor([-1])).tolist() == [[65535.0] * 4]
