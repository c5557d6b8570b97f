"""`AdamWeightDecay` computes MindSpore's formula, and continues from a loaded state."""

import copy
import io
import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mfwrap import AdamWeightDecay
from mfwrap.optimizers import adam_weight_decay
from support.fsdp.optimizers import step_half_precision_shards
from support.optimizer_runs import HALF, give, gradients_of, parameters_of

WAYS = {
    "fused": {"fused": True},
    "unfused": {"fused": False},
    "fused float32 state": {"fused": True, "fp32_state": True},
    "unfused float32 state": {"fused": False, "fp32_state": True},
}
EACH_WAY = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def by_formula(weights, gradients, *, lr, betas, eps, weight_decay):
    """Return float64 weights after the gradients of several steps, computed by the formula."""
    weights = [weight.detach().double() for weight in weights]
    moments = [(torch.zeros_like(w), torch.zeros_like(w)) for w in weights]
    for step in gradients:
        for i, gradient in enumerate(step):
            m = betas[0] * moments[i][0] + (1 - betas[0]) * gradient.double()
            v = betas[1] * moments[i][1] + (1 - betas[1]) * gradient.double() ** 2
            moments[i] = m, v
            weights[i] = weights[i] - lr * (m / (v.sqrt() + eps) + weight_decay * weights[i])
    return weights


@pytest.mark.fast_sample(10)
@EACH_WAY
@given(
    lr=st.floats(1e-5, 0.1),
    betas=st.tuples(st.floats(0, 0.99), st.floats(0, 0.99999)),
    eps=st.floats(1e-8, 0.1),
    weight_decay=st.floats(0, 1),
)
def test_the_formula(way, lr, betas, eps, weight_decay):
    """Weights agree with the formula in float64 for any settings."""
    settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
    parameters, gradients = parameters_of(), [gradients_of(step) for step in range(4)]
    expected = by_formula(parameters, gradients, **settings)
    optimizer = AdamWeightDecay(parameters, **settings, **way)
    for step in gradients:
        give(parameters, step)
        optimizer.step()

    for weight, by_hand in zip(parameters, expected, strict=True):
        torch.testing.assert_close(weight.data.double(), by_hand, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_half_precision_weights_with_a_float32_state(fused, dtype, monkeypatch):
    """Each step is computed in float32, and rounds the weights once and the state never.

    The weights are updated in several portions, as those of a large network are.
    """
    monkeypatch.setattr(adam_weight_decay, "_MOST_ELEMENTS", 10)
    parameters = parameters_of(dtype)
    single = [nn.Parameter(weight.data.float()) for weight in parameters]
    optimizer = AdamWeightDecay(parameters, lr=0.01, weight_decay=0.1, fp32_state=True, fused=fused)
    reference = AdamWeightDecay(single, lr=0.01, weight_decay=0.1, fused=fused)
    for step in range(5):
        gradients = gradients_of(step, dtype)
        give(parameters, gradients)
        optimizer.step()
        give(single, [gradient.float() for gradient in gradients])
        reference.step()
        for ours, weight in zip(parameters, single, strict=True):
            assert torch.equal(ours.data, weight.data.to(dtype))
            weight.data.copy_(ours.data)  # the reference continues from the rounded weights

    for ours, weight in zip(parameters, single, strict=True):
        for name, value in reference.state[weight].items():
            assert torch.equal(optimizer.state[ours][name], value)


@pytest.mark.parametrize("dtype", HALF)
def test_the_state_has_by_default_the_dtype_of_its_weight(dtype):
    """Without ``fp32_state``, the moments of half-precision weights have half precision."""
    parameters = parameters_of(dtype)
    give(parameters, gradients_of(0, dtype))
    optimizer = AdamWeightDecay(parameters)
    optimizer.step()
    assert {v.dtype for state in optimizer.state.values() for v in state.values()} == {dtype}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@EACH_WAY
@pytest.mark.parametrize("bias_correction", [False, True], ids=["", "bias correction"])
@pytest.mark.parametrize("copied", ["saved", "deep copy"])
def test_a_loaded_state_continues_the_training(way, dtype, copied, bias_correction):
    """After a checkpoint, or in a copy, the same gradients give bitwise the same weights."""
    way = way | {"bias_correction": bias_correction}
    parameters = parameters_of(dtype)
    optimizer = AdamWeightDecay(parameters, lr=0.01, **way)
    give(parameters, gradients_of(0, dtype))
    optimizer.step()
    if copied == "saved":
        others = [nn.Parameter(weight.data.clone()) for weight in parameters]
        resumed = AdamWeightDecay(others, lr=0.5, **way)
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
        resumed.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    else:
        resumed = copy.deepcopy(optimizer)
        others = list(itertools.chain(*(group["params"] for group in resumed.param_groups)))
    for step in (1, 2):
        for weights, each in ((parameters, optimizer), (others, resumed)):
            give(weights, gradients_of(step, dtype))
            each.step()

    for left, right in zip(parameters, others, strict=True):
        assert torch.equal(left, right)
        assert left.data_ptr() != right.data_ptr()


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
def test_bias_correction_gives_torchs_adamw(fused):
    """With float32 weights and bias correction, weights and state are those of torch's AdamW."""
    settings = {"lr": 0.01, "betas": (0.8, 0.95), "weight_decay": 0.1, "eps": 1e-8}
    parameters, others = parameters_of(), parameters_of()
    optimizer = AdamWeightDecay(parameters, **settings, bias_correction=True, fused=fused)
    reference = torch.optim.AdamW(others, **settings, fused=fused)
    for step in range(4):
        for weights, each in ((parameters, optimizer), (others, reference)):
            give(weights, gradients_of(step))
            each.step()

    for ours, expected in zip(parameters, others, strict=True):
        assert torch.equal(ours, expected)
        torch.testing.assert_close(optimizer.state[ours], reference.state[expected], rtol=0, atol=0)


def test_half_precision_shards(two_ranks):
    """In a loop without a cell, sharded weights with a float32 state equal whole ones."""
    for weights in two_ranks.run(step_half_precision_shards):
        for whole, gathered in weights:
            assert torch.equal(whole, gathered)


@pytest.mark.parametrize("fused", [True, None], ids=["fused", "chosen by torch"])
def test_a_state_of_torchs_adamw(fused):
    """A state of torch's AdamW is continued; the settings that only this class has stay."""
    parameters, others = parameters_of(), parameters_of()
    reference = torch.optim.AdamW(others, lr=0.01, fused=fused)
    optimizer = AdamWeightDecay(parameters, lr=0.5, bias_correction=True, fp32_state=True)
    for step in range(3):
        give(others, gradients_of(step))
        reference.step()
        if step == 0:
            optimizer.load_state_dict(copy.deepcopy(reference.state_dict()))
            for ours, theirs in zip(parameters, others, strict=True):
                ours.data.copy_(theirs)
        else:
            give(parameters, gradients_of(step))
            optimizer.step()

    assert optimizer.param_groups[0]["fp32_state"] is optimizer.param_groups[0]["fused"] is True
    for ours, theirs in zip(parameters, others, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_a_closure_gives_the_gradients():
    """The closure runs with gradients enabled, and its loss is returned."""
    weight = nn.Parameter(torch.ones(1))
    optimizer = AdamWeightDecay([weight], lr=0.01)

    def closure():
        loss = (3 * weight).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 3
    assert weight.item() == pytest.approx(1 - 0.0316, abs=1e-4)


def test_a_gradient_scaler_of_torch():
    """The GradScaler of torch leaves unscaling and skipping to the fused kernel."""
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    scaled, plain = (AdamWeightDecay([weight], lr=0.01) for weight in weights)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for factor in (1.0, float("inf"), 2.0):
        scaler.scale((weights[0] * factor).sum()).backward()
        scaler.step(scaled)
        scaler.update()
        scaled.zero_grad()
        if factor != float("inf"):
            weights[1].grad = torch.full((3,), factor)
            plain.step()

    assert torch.equal(*weights)


@pytest.mark.parametrize(
    ("settings", "error", "says"),
    [
        ({"lr": -1.0}, ValueError, "`lr` must be >= 0 and finite, got -1.0"),
        ({"lr": "1e-3"}, TypeError, "`lr` must be a number"),
        ({"betas": (1.0, 0.9)}, ValueError, r"`betas\[0\]` must be in \[0, 1\), got 1.0"),
        ({"betas": (0.9, -0.1)}, ValueError, r"`betas\[1\]` must be >= 0"),
        ({"eps": float("nan")}, ValueError, "`eps` must be >= 0 and finite, got nan"),
        ({"weight_decay": -0.1}, ValueError, "`weight_decay` must be >= 0"),
    ],
)
def test_a_wrong_argument_is_named(settings, error, says):
    """An argument out of range is an error at construction."""
    with pytest.raises(error, match=says):
        AdamWeightDecay([nn.Parameter(torch.ones(1))], **settings)
