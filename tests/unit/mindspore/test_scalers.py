"""Managers and scalers check their arguments, and scalers handle structures and devices."""

import math
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfwrap import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    FixedLossScaleManager,
    LossScaler,
    StaticLossScaler,
    all_finite,
)
from support.host_reads import HostReads

MANAGER_ERRORS = {
    "bool": (lambda: FixedLossScaleManager(True), TypeError, "`loss_scale` must be a number"),  # noqa: FBT003  (the wrong type under test)
    "text": (lambda: FixedLossScaleManager("1"), TypeError, "`loss_scale` must be a number"),
    "below": (lambda: FixedLossScaleManager(0.5), ValueError, "must be >= 1 and finite, got 0.5"),
    "nan": (lambda: FixedLossScaleManager(math.nan), ValueError, "must be >= 1 and finite"),
    "inf": (lambda: DynamicLossScaleManager(math.inf), ValueError, "`init_loss_scale` must be"),
    "huge": (lambda: DynamicLossScaleManager(10**400), ValueError, "`init_loss_scale` must be"),
    "drop": (
        lambda: FixedLossScaleManager(1.0, drop_overflow_update=1),
        TypeError,
        "`drop_overflow_update` must be a bool",
    ),
    "factor": (lambda: DynamicLossScaleManager(8, 0.5), ValueError, "`scale_factor` must be >= 1"),
    "window": (
        lambda: DynamicLossScaleManager(8, 2, True),  # noqa: FBT003  (the wrong type under test)
        TypeError,
        "`scale_window` must be an int",
    ),
    "scaler": (lambda: StaticLossScaler(math.inf), ValueError, "`scale_value` must be >= 1"),
    "float32": (lambda: StaticLossScaler(1e39), ValueError, "must be finite in float32, got 1e"),
    "scaler factor": (lambda: DynamicLossScaler(8, -2, 1), ValueError, "`scale_factor` must be"),
    "abstract": (lambda: LossScaler(2.0), TypeError, "abstract"),
}


@pytest.mark.parametrize(("call", "error", "message"), MANAGER_ERRORS.values(), ids=MANAGER_ERRORS)
def test_errors(call, error, message):
    """Each wrong argument is refused at construction, with MindSpore's exception type."""
    with pytest.raises(error, match=message) as raised:
        call()
    assert raised.type is error


def test_structures_are_kept():
    """Nested tensors are scaled, ``None`` stays, and the inputs are unchanged."""
    tensors = {"a": [torch.ones(2), None], "b": (torch.ones(()).double(),)}
    scaled = StaticLossScaler(8.0).scale(tensors)

    assert list(scaled) == ["a", "b"]
    assert torch.equal(scaled["a"][0], torch.full((2,), 8.0))
    assert scaled["a"][1] is None
    assert type(scaled["b"]) is tuple
    assert torch.equal(scaled["b"][0], torch.full((), 8.0, dtype=torch.float64))
    assert torch.equal(tensors["a"][0], torch.ones(2))


@given(st.integers(0, 40), st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=8))
def test_unscale_undoes_scale(exponent, values):
    """Scaling and unscaling by a power of two is exact."""
    scaler, gradients = StaticLossScaler(2.0**exponent), torch.tensor(values)
    assert torch.equal(scaler.unscale(scaler.scale(gradients)), gradients)


def test_a_scaled_loss_is_differentiable_after_an_adjustment():
    """Gradients have the scale that multiplied the loss, even after an adjustment."""
    scaler, weight = DynamicLossScaler(8.0, 2, 1), torch.ones((), requires_grad=True)
    scaled = scaler.scale(weight * 3)
    before = scaler.scale_value
    scaler.adjust(all_finite(weight))
    scaled.backward()

    assert weight.grad == 24.0
    assert (before, scaler.scale_value) == (8.0, 16.0)


@pytest.mark.parametrize("method", ["scale", "unscale"])
@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (3.0, "`inputs` must hold only tensors, got 3.0 of type float"),
        ([torch.ones(1), "x"], "`inputs` must hold only tensors, got 'x'"),
        (
            (torch.ones(1), torch.ones(1).long()),
            "floating-point tensors, got a tensor of torch.int64",
        ),
    ],
    ids=["number", "text", "integers"],
)
def test_what_cannot_be_scaled(inputs, message, method):
    """Scaling a number, a string or an integer tensor raises an error that describes the value."""
    with pytest.raises(TypeError, match=re.escape(message)):
        getattr(StaticLossScaler(8.0), method)(inputs)


@pytest.mark.parametrize("inputs", [(), [None], 3.0, "x", [torch.ones(1), 2]], ids=str)
def test_all_finite_needs_tensors(inputs):
    """`all_finite` raises a TypeError if there is no tensor, or a value that is not a tensor."""
    with pytest.raises(TypeError, match="`inputs` must hold"):
        all_finite(inputs)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.complex64], ids=str)
def test_all_finite_in_any_dtype(dtype, bad):
    """A non-finite element is found anywhere in a structure and in any dtype."""
    fine = {"a": [torch.zeros(3, dtype=dtype), None], "b": torch.arange(3)}
    assert all_finite(fine)
    fine["a"][0][1] = bad
    assert not all_finite(fine)


def test_nothing_waits():
    """A user's step with a dynamic scaler reads nothing on the host."""
    scaler = DynamicLossScaler(8.0, 2, 1)
    loss, gradients = torch.ones(()), (torch.ones(3), torch.ones(2))
    with HostReads() as host:
        scaler.scale(loss)
        scaler.adjust(all_finite(scaler.unscale(gradients)))
    assert host.reads == []
    assert scaler.scale_value == 16.0


@pytest.mark.cuda
def test_scaler_on_cuda():
    """The scaler moves to the device of its tensors once, without synchronization."""
    scaler = DynamicLossScaler(8.0, 2, 1)
    gradients = (torch.ones(3, device="cuda"), torch.ones(2, device="cuda"))
    scaler.scale(gradients[0])
    torch.cuda.set_sync_debug_mode("error")
    try:
        unscaled = scaler.unscale(gradients)
        scaler.adjust(all_finite(unscaled))
    finally:
        torch.cuda.set_sync_debug_mode("default")

    assert scaler.scale_value.device.type == scaler.counter.device.type == "cuda"
    assert scaler.scale_value.item() == 16.0
    assert unscaled[0].tolist() == [0.125] * 3
