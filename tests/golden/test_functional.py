"""Gradient functions return MindSpore's values and nesting, and raise MindSpore's errors."""

import builtins
from typing import Any

import pytest
import torch
from torch import Tensor

import mfwrap
from mfwrap import StaticLossScaler, all_finite, clip_by_global_norm, value_and_grad
from support.golden.traces import TOLERANCE, assert_same, parametrized, tensor
from support.gradient_networks import GradientNetwork


def weights_of(network: GradientNetwork, kind: str) -> Any:
    """Return the network's weights in the container that a case passes to the gradient function."""
    return {
        "none": None,
        "parameter": network.fc.weight,
        "list": list(network.parameters()),
        "parameter_tuple": tuple(network.parameters()),
    }[kind]


def assert_nested(actual: Any, recorded: Any) -> None:
    """Assert equal containers, ids, dtypes and shapes, and values within the tolerance."""
    ((kind, expected),) = recorded.items()
    if kind == "tuple":
        assert type(actual) is tuple
        for one, other in zip(actual, expected, strict=True):
            assert_nested(one, other)
    elif kind == "tensor":
        assert isinstance(actual, Tensor)
        other = tensor(expected)
        assert (actual.dtype, actual.shape) == (other.dtype, other.shape)
        assert_same(actual.detach(), expected["data"], relative=TOLERANCE)
    else:
        assert (type(actual).__name__, actual) == (kind, expected)


@pytest.mark.parametrize("case", parametrized("grad_tables"))
def test_grad_tables(case):
    """Each combination of positions, weights, has_aux and return_ids gives the recorded result."""
    network = GradientNetwork(case["weight"], case["network"])
    position = case["grad_position"]
    arguments = {
        "grad_position": tuple(position) if isinstance(position, list) else position,
        "weights": weights_of(network, case["weights"]),
        "has_aux": case["has_aux"],
        "return_ids": case["return_ids"],
    }
    make = getattr(mfwrap, case["api"])
    if "raises" in case["expected"]:
        expected = getattr(builtins, case["expected"]["raises"]["type"])
        with pytest.raises(expected) as raised:
            make(network, **arguments)
        assert raised.type is expected
        return
    inputs = torch.tensor(case["x"], dtype=torch.float32), torch.tensor(float(case["y"]))

    assert_nested(make(network, **arguments)(*inputs), case["expected"]["ok"])
    assert network.fc.weight.grad is None


@pytest.mark.parametrize("case", parametrized("functional_step"))
def test_functional_step(case):
    """A hand-written step gives the recorded loss, gradients, overflow flags and clipping."""
    network = GradientNetwork(case["weight"])
    scaler = StaticLossScaler(case["scale"])

    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        loss, logits = network(x, y)
        return scaler.scale(loss), logits

    gradient_function = value_and_grad(forward, None, network.parameters(), has_aux=True)
    x, y = torch.tensor(case["x"], dtype=torch.float32), torch.tensor(float(case["y"]))
    (scaled_loss, logits), scaled = gradient_function(x, y)
    gradients = scaler.unscale(scaled)

    expected = case["expected"]
    assert_nested(scaled_loss, expected["scaled_loss"])
    assert_nested(logits, expected["logits"])
    assert_nested(scaled, expected["scaled_grads"])
    assert_nested(scaler.unscale(scaled_loss), expected["loss"])
    assert_nested(gradients, expected["grads"])
    assert all_finite(scaled).item() is expected["all_finite_scaled"]
    assert all_finite(gradients).item() is expected["all_finite_unscaled"]
    assert_nested(clip_by_global_norm(gradients, case["clip_norm"]), expected["clipped"])
