"""Training with the cell agrees with plain torch, at any loss scale."""

import copy
import functools
import math
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from support.small_llama import byte_batch, small_llama
from support.small_networks import Classifier, labelled_batches
from support.training_runs import NUM_STEPS, OPTIMIZERS, Trace, train_plainly, train_with_cell

SCALES = [1.0, 2.0**16]
MAX_NORM = 0.5
"""Limit of the norm. It is below every norm of these runs, so every step is clipped."""


class Task(NamedTuple):
    network: nn.Module
    batches: list[Any]


@functools.cache
def task(name: str) -> Task:
    """Return a network and its batches."""
    torch.manual_seed(0)
    if name == "MLP":
        return Task(Classifier(), labelled_batches(NUM_STEPS))
    return Task(small_llama(), [byte_batch([24] * 4, start=13 * i) for i in range(NUM_STEPS)])


@functools.cache
def plain(name: str, optimizer: str, max_norm: float | None, dtype=None) -> Trace:
    """Return the trace of training with plain torch."""
    network, batches = task(name)
    return train_plainly(network, OPTIMIZERS[optimizer], batches, max_norm=max_norm, dtype=dtype)


@functools.cache
def ours(name: str, optimizer: str, max_norm: float | None, scale: float) -> Trace:
    """Return the trace of training with the cell."""
    network, batches = task(name)
    return train_with_cell(network, OPTIMIZERS[optimizer], batches, max_norm=max_norm, scale=scale)


def assert_bitwise(expected: Trace, actual: Trace) -> None:
    """Fail unless losses, rates, weights and averages are the same to the last bit."""
    assert torch.equal(actual.losses, expected.losses)
    assert torch.equal(actual.rates, expected.rates)
    for kind in ("weights", "averages"):
        for ours_here, theirs in zip(getattr(actual, kind), getattr(expected, kind), strict=True):
            assert torch.equal(ours_here, theirs)


def assert_near(
    expected: Trace, actual: Trace, *, losses: float, norms: float, weights: float
) -> None:
    """Fail unless rates are equal, and losses, norms, weights and averages are close.

    Args:
        expected: Trace of any dtype.
        actual: Trace in float32.
        losses: Relative tolerance of losses.
        norms: Relative tolerance of norms.
        weights: Absolute tolerance of weights and averages.
    """
    assert torch.equal(actual.rates, expected.rates)
    torch.testing.assert_close(actual.losses, expected.losses, rtol=losses, atol=0)
    torch.testing.assert_close(actual.norms, expected.norms, rtol=norms, atol=0)
    for kind in ("weights", "averages"):
        for ours_here, theirs in zip(getattr(actual, kind), getattr(expected, kind), strict=True):
            torch.testing.assert_close(ours_here.double(), theirs.double(), rtol=0, atol=weights)


each_network = pytest.mark.parametrize("network", ["MLP", "Llama"])
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
each_scale = pytest.mark.parametrize("scale", SCALES, ids=["scale 1", "scale 2**16"])


@each_scale
@pytest.mark.parametrize("max_norm", [None, math.inf], ids=["not clipped", "clipped at inf"])
@each_optimizer
@each_network
def test_without_clipping_training_is_plain_torchs_to_the_last_bit(
    network, optimizer, max_norm, scale
):
    """Unclipped training equals plain torch bitwise if the scale is a power of two."""
    assert_bitwise(plain(network, optimizer, None), ours(network, optimizer, max_norm, scale))


@each_scale
@each_optimizer
@each_network
def test_norms_are_those_of_plain_torch(network, optimizer, scale):
    """The reported global norm is unscaled and agrees with plain torch."""
    expected = plain(network, optimizer, None).norms

    # The cell first adds up blocks of at most 16,384 squares, and then the sums of at most 21
    # tensors. Its norm differs from torch's norm by a few roundings of 6e-8 each.
    actual = ours(network, optimizer, math.inf, scale).norms
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=0)


@each_scale
@each_optimizer
@each_network
def test_clipped_training_agrees_with_plain_torch(network, optimizer, scale):
    """Losses, norms, rates, weights and averages agree with clipped training in plain torch.

    The cell divides each gradient by ``scale / coefficient``; torch multiplies it by the
    coefficient. The cell also sums the squares of the norm in another order. Together this changes
    an update by at most 4 units in the last place, or 5e-7 relative. SGD has the largest updates:
    0.05 (rate) * 0.5 (clipped norm) * 10 (momentum) = 0.25. If all errors have one sign, 30 steps
    add up to 30 * 0.25 * 5e-7 = 4e-6. Losses and norms differ because the weights differ. Largest
    differences seen: 2.4e-7 in a weight, 7e-7 relative in a norm.
    """
    assert_near(
        plain(network, optimizer, MAX_NORM),
        ours(network, optimizer, MAX_NORM, scale),
        losses=1e-6,
        norms=1e-5,
        weights=4e-6,
    )


@each_optimizer
@each_network
def test_clipped_training_is_the_same_at_any_power_of_two(network, optimizer):
    """Clipped training at scale 2**16 equals training at scale 1 bitwise."""
    unscaled, scaled = (ours(network, optimizer, MAX_NORM, scale) for scale in SCALES)

    assert_bitwise(unscaled, scaled)
    assert torch.equal(scaled.norms, unscaled.norms)


@each_scale
@pytest.mark.parametrize("max_norm", [math.inf, MAX_NORM], ids=["not clipped", "clipped"])
@each_optimizer
@each_network
def test_training_agrees_with_float64(network, optimizer, max_norm, scale):
    """Training agrees with float64 up to float32's rounding errors.

    Weights are below 2 in magnitude, and updates below 1, so each step rounds a weight and its
    update by at most 6e-8 each. If all errors have one sign, 30 steps add up to 30 * 1.2e-7 = 4e-6.
    Later steps start from these errors, so the tolerance is twice that. Largest differences seen,
    for the cell and for plain torch in float32: 8e-7 in a weight, 1.1e-5 relative in a norm.
    """
    assert_near(
        plain(network, optimizer, max_norm, torch.float64),
        ours(network, optimizer, max_norm, scale),
        losses=5e-6,
        norms=1e-4,
        weights=8e-6,
    )


@pytest.mark.cuda
@each_scale
@pytest.mark.parametrize("optimizer", ["fused AdamW", "fused SGD", "foreach AdamW"])
def test_training_on_cuda_agrees_with_float64(optimizer, scale):
    """Training on CUDA agrees with float64 at the same tolerances as on CPU."""
    network, batches = task("MLP")
    actual = train_with_cell(
        copy.deepcopy(network).cuda(),
        OPTIMIZERS[optimizer],
        [tuple(value.cuda() for value in batch) for batch in batches],
        max_norm=MAX_NORM,
        scale=scale,
    )
    on_host = actual._replace(
        weights=[weight.cpu() for weight in actual.weights],
        averages=[average.cpu() for average in actual.averages],
    )

    expected = plain("MLP", optimizer, MAX_NORM, torch.float64)
    assert_near(expected, on_host, losses=5e-6, norms=1e-4, weights=8e-6)


def test_these_runs_learn_and_clip():
    """Losses fall and every norm is above the limit in the runs of these tests."""
    for name in ("MLP", "Llama"):
        trace = ours(name, "fused SGD", MAX_NORM, 2.0**16)
        assert trace.losses[-5:].mean() < 0.9 * trace.losses[:5].mean()
        assert trace.norms.min() > MAX_NORM
        assert not torch.equal(trace.weights[0], plain(name, "fused SGD", None).weights[0])
