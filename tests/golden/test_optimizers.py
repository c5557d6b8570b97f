"""Unscaling, in the fused optimizer or in place, agrees with MindSpore and MindFormers."""

from itertools import chain

import pytest
import torch
from torch import nn

from mfwrap.step.skipping import SkippableOptimizer
from support.golden.traces import (
    TOLERANCE,
    EarlyEpsilonAdam,
    assert_same,
    cases,
    floats,
    optimizer_of,
    parametrized,
    tensor,
)

NO_SKIP = torch.zeros((), dtype=torch.bool)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "in_place"])
@pytest.mark.parametrize("case", parametrized("grad_scale"))
def test_unscaling(case, fused):
    """Gradients of every dtype are multiplied by the scale's reciprocal in float32."""
    gradients = [tensor(recorded) for recorded in case["input"]]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    # The unscaled gradients are in `grad`, whether the optimizer is fused or not.
    optimizer = SkippableOptimizer(torch.optim.Adam(parameters, lr=1.0, eps=1e-6, fused=fused))

    optimizer.step(floats(case["scale"]).float(), NO_SKIP)

    recorded = case["mindformers_scalar"]["ok"]["tuple"]
    for parameter, expected in zip(parameters, recorded, strict=True):
        # MindFormers returns float32, but mfwrap rounds a float16 gradient once, at the end. The
        # tolerance allows this rounding.
        resolution = torch.finfo(parameter.dtype)
        torch.testing.assert_close(
            parameter.grad.float(),
            tensor(expected["tensor"]),
            rtol=resolution.eps / 2 + torch.finfo(torch.float32).eps,
            atol=resolution.smallest_normal * resolution.eps / 2,
            equal_nan=True,
        )


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "in_place"])
def test_unscaling_by_more_than_float16_holds(fused):
    """A float16 gradient stays exact at a scale whose reciprocal is zero in float16."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    parameter.grad = torch.full((1,), 2.0**15, dtype=torch.float16)
    optimizer = SkippableOptimizer(torch.optim.Adam([parameter], lr=1.0, eps=1e-6, fused=fused))
    optimizer.step(torch.full((), 2.0**26), NO_SKIP)
    assert parameter.grad.item() == 2.0**-11


OTHER_EPSILON = {"adam_eps_big": 0.03, "adam_loss_scale": 3e-5}
"""Largest difference between the weights of torch's Adam and those of MindSpore's nn.Adam.

MindSpore adds eps before the bias correction, torch after it. The difference shows where eps is not
small compared with the gradients: in the first case because eps is 0.01, in the second because the
gradients are divided by 1024.
"""


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        pytest.param(name, fused, id=f"{name}-{'fused' if fused else 'in_place'}")
        for name in cases("optimizers")
        if name not in OTHER_EPSILON
        for fused in (True, False)
    ],
)
def test_weights_from_scaled_gradients(name, fused):
    """An optimizer that receives scaled gradients and their scale gives the recorded weights."""
    assert_same(weights_of(name, fused=fused), recorded_weights(name), relative=TOLERANCE)


@pytest.mark.parametrize("name", OTHER_EPSILON)
def test_another_epsilon(name):
    """MindSpore's Adam formula gives the recorded weights; torch's differs by a known distance."""
    written_out = weights_of(name, fused=False, kind=EarlyEpsilonAdam)
    assert_same(written_out, recorded_weights(name), relative=TOLERANCE)

    for fused in (True, False):
        weights = weights_of(name, fused=fused).double()
        distance = (weights - floats(recorded_weights(name))).abs().max()
        assert distance.item() == pytest.approx(OTHER_EPSILON[name], rel=0.2)


def weights_of(name: str, *, fused: bool, kind: type[torch.optim.Optimizer] | None = None):
    """Return the weights after each step of an optimizer that receives scaled gradients."""
    case = cases("optimizers")[name]
    parameters = {p["name"]: nn.Parameter(tensor(p)) for p in case["params"]}
    inner, schedule = optimizer_of(case, parameters, fused=fused, kind=kind)
    optimizer = SkippableOptimizer(inner)
    assert optimizer.skips_on_device is fused
    scale = torch.full((), 1000.0)
    weights = []
    for gradients in case["grads"]:
        for parameter, gradient in zip(parameters.values(), gradients, strict=True):
            scaled = floats(gradient).float() * scale
            parameter.grad = scaled.reshape(parameter.shape)
        optimizer.step(scale, NO_SKIP)
        schedule.step()
        weights.append(torch.cat([p.detach().flatten() for p in parameters.values()]))
    return torch.stack(weights)


def recorded_weights(name: str) -> list[list[float]]:
    """Return the recorded weights after each step."""
    return [
        list(chain.from_iterable(step["params"])) for step in cases("optimizers")[name]["expected"]
    ]
