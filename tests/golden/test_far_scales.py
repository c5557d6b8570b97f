"""Loss scales above 2**60, where mfwrap differs from MindSpore on purpose.

In MindSpore, a step overflows if an element of the gradients is not finite. In mfwrap, it overflows
if the norm of the scaled gradients is not finite in float32.
"""

import copy

import pytest
import torch
from torch import Tensor

from support.golden.replays import FAR_SCALES, LOSS_SCALE, MF, Replay, replays, run_of
from support.golden.traces import assert_same, cases

far_scales = pytest.mark.parametrize(
    ("family", "name", "fused"),
    [values for values in replays(LOSS_SCALE, MF) if values.values[1] in FAR_SCALES],
)
both_ways = pytest.mark.parametrize("fused", [True, False], ids=["fused", "in_place"])


def test_far_scales():
    """The cases with a loss scale above 2**60 are those that tests/golden/README.md names."""
    assert {
        "ls_probe_natural_overflow",
        "ls_probe_tensor_2p126",
        "ls_relu_natural_overflow_b",
        "ls_tensor1d_set_sense",
        "mf_natural_overflow_b",
        "mf_relu_natural_overflow",
    } == FAR_SCALES


def norm_overflows(replay: Replay, batch: list[Tensor]) -> bool:
    """Return whether the sum of squares of the scaled gradients exceeds float32's range.

    The gradients are computed in float64, from the current weights.
    """
    network = copy.deepcopy(replay.network).double()
    network.zero_grad(set_to_none=True)
    network(*(value.double() for value in batch)).backward()
    squares = torch.stack([p.grad.square().sum() for p in network.parameters()]).sum()
    scaled = squares * replay.cell.scale_sense.double() ** 2
    return not scaled <= torch.finfo(torch.float32).max


@far_scales
def test_far_scale_overflows_with_the_norm(family, name, fused):
    """Above a scale of 2**60, an update is skipped if and only if its scaled norm overflows."""
    replay = Replay(cases(family)[name], fused=fused)
    for index in range(replay.case["steps"]):
        replay.set_scale(index)
        batch = replay.batch(index)
        overflows = norm_overflows(replay, batch)
        before = torch.cat(replay.weights())

        output = replay.cell(*batch)

        assert output.overflow.item() is overflows
        assert torch.equal(torch.cat(replay.weights()), before) is overflows
        assert output.loss_scale.isfinite()


@far_scales
def test_far_scale_recovers(family, name, fused):
    """Updates are applied again once the loss scale is low enough."""
    replay = Replay(cases(family)[name], fused=fused)
    for index in range(replay.case["steps"]):
        replay.step(index)
    if replay.case["scale_sense"]["kind"] == "tensor":
        replay.cell.set_sense_scale(torch.full((1,), 1024.0))
    batch = next(b for b in map(replay.batch, range(replay.case["steps"])) if is_finite(b))
    before = torch.cat(replay.weights())

    # Each overflow halves the scale, so 70 steps reach finite squares even from 2**126.
    for _ in range(70):
        output = replay.cell(*batch)
        if not output.overflow:
            break

    assert not output.overflow
    assert 1 <= output.loss_scale < 2.0**66
    after = torch.cat(replay.weights())
    assert after.isfinite().all()
    assert not torch.equal(after, before)


def is_finite(batch: list[Tensor]) -> bool:
    """Return whether all inputs are finite."""
    return all(bool(value.isfinite().all()) for value in batch)


@both_ways
def test_fixed_scale_of_2_to_the_126_applies_nothing(fused):
    """At a fixed scale of 2**126 every update is skipped (MindSpore applied four)."""
    run = run_of(LOSS_SCALE, "ls_probe_tensor_2p126", fused)
    initial = torch.cat(Replay(run.replay.case, fused=fused).weights())
    assert run.stacked("overflow").all()
    assert all(torch.equal(weights, initial) for weights in run.weights)


@both_ways
def test_scale_set_to_2_to_the_126_and_back(fused):
    """A run equals MindSpore's if its scale is so high that steps overflow in MindSpore too."""
    run = run_of(LOSS_SCALE, "ls_tensor1d_set_sense", fused)
    assert_same(run.stacked("overflow"), run.recorded("overflow"))
    assert_same(run.stacked("loss_scale"), run.recorded("loss_scale"))
    run.assert_weights()
