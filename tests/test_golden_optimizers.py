"""Unscaling gives the numbers recorded from MindSpore and MindFormers, folded and in place."""

from itertools import chain

import pytest
import torch
from torch import nn

from golden_traces import (
    FUSED,
    TOLERANCE,
    assert_same,
    cases,
    floats,
    optimizer_of,
    parametrized,
    tensor,
)
from mfwrap.optimizers import SkippableOptimizer

NO_SKIP = torch.zeros((), dtype=torch.bool)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "in_place"])
@pytest.mark.parametrize("case", parametrized("grad_scale"))
def test_unscaling(case, fused):
    """Gradients are multiplied by the scale's reciprocal in float32, whatever their dtype."""
    gradients = [tensor(recorded) for recorded in case["input"]]
    parameters = [nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    # Either way leaves what the optimizer saw in the gradients.
    optimizer = SkippableOptimizer(torch.optim.Adam(parameters, lr=1.0, fused=fused))

    optimizer.step(floats(case["scale"]).float(), NO_SKIP)

    recorded = case["mindformers_scalar"]["ok"]["tuple"]
    for parameter, expected in zip(parameters, recorded, strict=True):
        # MindFormers leaves float32; a float16 gradient may be rounded once, at the end.
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
    """A float16 gradient survives a scale whose reciprocal is zero in float16."""
    parameter = nn.Parameter(torch.zeros(1, dtype=torch.float16))
    parameter.grad = torch.full((1,), 2.0**15, dtype=torch.float16)
    optimizer = SkippableOptimizer(torch.optim.Adam([parameter], lr=1.0, fused=fused))
    optimizer.step(torch.full((), 2.0**26), NO_SKIP)
    assert parameter.grad.item() == 2.0**-11


# nn.Adam adds eps before the bias correction, torch after it: visible where eps is not small beside
# the gradients, because it is 0.01 or because the gradients are divided by 1024.
OTHER_EPSILON = {"adam_eps_big", "adam_loss_scale"}


@pytest.mark.parametrize(
    ("name", "fused"),
    [
        pytest.param(name, fused, id=f"{name}-{'fused' if fused else 'in_place'}")
        for name, case in cases("optimizers").items()
        if name not in OTHER_EPSILON
        for fused in (True, False)
        if not fused or case["optimizer"]["class"] in FUSED
    ],
)
def test_weights_from_scaled_gradients(name, fused):
    """An optimizer that is given scaled gradients and the scale goes the recorded way."""
    case = cases("optimizers")[name]
    parameters = {p["name"]: nn.Parameter(tensor(p)) for p in case["params"]}
    inner, schedule = optimizer_of(case, parameters, fused=fused)
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
        weights.append([parameter.detach().clone().flatten() for parameter in parameters.values()])

    assert_same(
        torch.stack([torch.cat(step) for step in weights]),
        [list(chain.from_iterable(step["params"])) for step in case["expected"]],
        relative=TOLERANCE,
    )
