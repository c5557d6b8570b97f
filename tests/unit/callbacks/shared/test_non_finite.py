"""Non-finite weights, buffers and optimizer states are found and named."""

import math

import pytest
import torch
from torch import nn

from mfwrap.callbacks.shared.non_finite import (
    BufferWatch,
    bad_optimizer_states,
    bad_weights,
    non_finite,
)

INF, NAN = math.inf, math.nan


@pytest.mark.parametrize(
    "dtype",
    [torch.float64, torch.float32, torch.bfloat16, torch.float8_e5m2, torch.complex64],
    ids=str,
)
def test_tensors_of_each_dtype(dtype):
    """NaN and infinities are told apart in each dtype; the largest finite number is finite."""
    largest = torch.finfo(dtype).max
    values = {"fine": [largest, -1.0], "nan": [NAN, -INF], "inf": [1.0, -INF]}
    tensors = {name: torch.tensor(each).to(dtype) for name, each in values.items()}
    if dtype == torch.float64:
        tensors["fine"] = torch.full((2,), largest, dtype=dtype)

    found = non_finite(tensors | {"none": torch.zeros(0), "integers": torch.ones(3).long()})

    assert list(found) == ["nan", "inf"]
    assert math.isnan(found["nan"])
    assert found["inf"] == INF


def test_weights():
    """A non-finite weight is named, whether it is trainable or frozen."""
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    assert bad_weights(network) == ()

    network[1].bias.requires_grad_(requires_grad=False)[0] = -INF

    assert bad_weights(network) == ("1.bias",)


def test_optimizer_states():
    """A non-finite state is named after its parameter; other parameters are numbered."""
    network, outside = nn.Linear(1, 1), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.AdamW([*network.parameters(), outside])
    for parameter in (*network.parameters(), outside):
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    assert bad_optimizer_states(network, optimizer) == ()

    optimizer.state[network.bias]["exp_avg"][0] = INF
    optimizer.state[outside]["exp_avg_sq"][0] = NAN

    assert bad_optimizer_states(network, optimizer) == (
        "exp_avg of bias",
        "exp_avg_sq of parameter 2 outside the network",
    )


def test_a_buffer_that_is_infinite_on_purpose():
    """A buffer that held an infinity from the start is bad only if it holds a NaN."""
    network = nn.BatchNorm1d(1)
    network.register_buffer("mask", torch.tensor([0.0, -INF]))
    watch = BufferWatch(network)
    assert watch.bad() == ()

    network.running_mean.fill_(INF)
    assert (watch.newly_bad(), watch.newly_bad()) == (("running_mean",), ())
    network.mask[0] = NAN
    assert watch.newly_bad() == ("mask",)
    assert watch.bad() == ("running_mean", "mask")
