"""Clipping in an attached loop agrees with accelerate at any loss scale."""

import copy
import math

import pytest
import torch

from mfwrap import StepConfig
from support.clipped_training import (
    LIMIT,
    NOT_CLIPPING,
    ONE_CALL,
    WAYS,
    ClippedTraining,
    Setting,
    assert_agree,
    calls,
    clipped_alone,
    doubled,
    norm_of,
    unscale,
    value,
)
from support.small_networks import labelled_batches

INF = math.inf
SCALED = [Setting(scale=1.0), Setting(scale=2.0**16), Setting("bf16", 2.0**16)]
FP16 = [Setting("fp16", 1.0), Setting("fp16", 2.0**12)]
CASES = [
    pytest.param(way, setting, id=f"{way}-{setting.precision}-scale {setting.scale:g}")
    for way in WAYS
    for setting in (SCALED + FP16 if way in ONE_CALL else SCALED)
]

each_way = pytest.mark.parametrize("way", WAYS)
each_scale = pytest.mark.parametrize("scale", [1.0, 2.0**16], ids=["scale 1", "scale 2**16"])
each_time = pytest.mark.parametrize(
    "each_micro_batch", [False, True], ids=["at the end", "each time"]
)


@pytest.mark.fast_sample(60)
@pytest.mark.parametrize("optimizer", ["fused SGD", "SGD", "foreach AdamW"])
@pytest.mark.parametrize(("way", "setting"), CASES)
def test_clipping_is_accelerates(way, setting, optimizer):
    """Every combination of clipping calls gives accelerate's return values and weights."""
    actual = ClippedTraining(optimizer, setting, attached=True).run(WAYS[way])

    assert_agree(clipped_alone(WAYS[way], optimizer, setting), actual)


@pytest.mark.fast_sample(24)
@each_time
@each_scale
@each_way
def test_clipping_of_accumulated_gradients_is_accelerates(way, scale, each_micro_batch):
    """Clipping accumulated gradients, once or at each micro-batch, agrees with accelerate."""
    setting = Setting(scale=scale, accumulation=4)
    settings = {"each_micro_batch": each_micro_batch}
    actual = ClippedTraining("fused SGD", setting, attached=True).run(WAYS[way], **settings)

    assert_agree(clipped_alone(WAYS[way], "fused SGD", setting, **settings), actual)


@pytest.mark.fast_sample(16)
@each_scale
@each_way
def test_clipping_between_two_backwards_is_accelerates(way, scale):
    """Clipping between the backwards of a manually accumulated update agrees with accelerate."""
    expected = ClippedTraining("fused SGD", Setting(), attached=False).run_by_hand(WAYS[way])

    training = ClippedTraining("fused SGD", Setting(scale=scale), attached=True)
    assert_agree(expected, training.run_by_hand(WAYS[way]))


def test_these_ways_of_clipping_differ():
    """Most of the compared ways of clipping lead to different weights."""
    weights = {
        way: tuple(clipped_alone(clip, "SGD").weights[0].view(-1).tolist())
        for way, clip in WAYS.items()
    }

    idle = {"nothing", "unscaled only", "below the limit", "max_norm of infinity"}
    assert len({weights[way] for way in idle}) == 1
    assert all(weights[way] != weights["nothing"] for way in set(WAYS) - set(NOT_CLIPPING) - idle)
    assert len(set(weights.values())) > len(WAYS) / 2


@each_scale
@pytest.mark.parametrize("norm_type", [2.0, INF])
def test_a_bare_tensor_is_clipped_as_a_list_of_it(norm_type, scale):
    """A bare tensor is clipped like a list that contains only that tensor."""

    def clip(training):
        weight = training.network.layers[0].weight
        return training.accelerator.clip_grad_norm_(weight, 0.02, norm_type=norm_type)

    actual = ClippedTraining("fused SGD", Setting(scale=scale), attached=True).run(clip)

    def in_list(training):
        weight = training.network.layers[0].weight
        return training.accelerator.clip_grad_norm_([weight], 0.02, norm_type=norm_type)

    assert_agree(clipped_alone(in_list, "fused SGD"), actual)


@each_scale
@pytest.mark.parametrize("limit", [LIMIT, INF])
def test_without_gradients_the_norm_is_zero(limit, scale):
    """The norm is zero before any backward and for parameters without gradients."""
    training = ClippedTraining("fused SGD", Setting(scale=scale), attached=True)
    network = training.network

    assert training.accelerator.clip_grad_norm_(network.parameters(), limit) == 0
    network.layers[0].requires_grad_(False)  # noqa: FBT003  (torch's signature)
    training.backward(labelled_batches(1)[0])
    assert training.accelerator.clip_grad_norm_(network.layers[0].parameters(), limit) == 0
    assert training.accelerator.clip_grad_norm_(network.parameters(), limit) > 0


@each_scale
@pytest.mark.parametrize("limit", [LIMIT, INF])
def test_parameters_in_no_optimizer_count_as_they_do_alone(limit, scale):
    """Parameters in no optimizer count towards the norm and are clipped, as in accelerate."""
    outcomes = [
        ClippedTraining(
            "fused SGD", setting, attached=attached, select=lambda n: n.layers[2].parameters()
        ).run(norm_of(limit=limit))
        for setting, attached in ((Setting(), False), (Setting(scale=scale), True))
    ]

    assert_agree(*outcomes)


@each_scale
@pytest.mark.parametrize("optimizer", ["fused SGD", "SGD", "foreach AdamW"])
@pytest.mark.parametrize("way", NOT_CLIPPING)
def test_the_configuration_clips_where_the_loop_does_not(way, optimizer, scale):
    """The config's clipping applies at the step if the loop does not clip."""
    config = StepConfig(use_clip_grad=True, max_grad_norm=LIMIT)
    training = ClippedTraining(optimizer, Setting(scale=scale), attached=True, config=config)
    actual = training.run(WAYS[way])

    expected = clipped_alone(calls(WAYS[way], norm_of()), optimizer)
    assert_agree(expected._replace(returned=[]), actual._replace(returned=[]))


@pytest.mark.fast_sample(16)
@each_scale
@pytest.mark.parametrize("way", [way for way in WAYS if way not in NOT_CLIPPING])
def test_the_loops_own_clipping_comes_before_the_configurations(way, scale):
    """The config's clipping does not apply if the loop clips or measures the norm itself."""
    config = StepConfig(use_clip_grad=True, max_grad_norm=0.01)
    training = ClippedTraining("fused SGD", Setting(scale=scale), attached=True, config=config)

    assert_agree(clipped_alone(WAYS[way], "fused SGD"), training.run(WAYS[way]))


HIDING = {
    "value": value,
    "whole": norm_of(),
    "its own part": norm_of(0),
    "another part": norm_of(2),
    "largest element": norm_of(norm_type=INF),
    "whole, then value": calls(norm_of(), value),
    "value, then whole": calls(value, norm_of()),
    "unscaled": calls(unscale, norm_of()),
}


@pytest.mark.fast_sample(24)
@each_scale
@pytest.mark.parametrize("accumulation", [1, 4])
@each_time
@pytest.mark.parametrize("optimizer", ["fused SGD", "SGD"])
@pytest.mark.parametrize("way", HIDING)
def test_an_infinite_element_that_clipping_hides_skips_all_the_same(
    way, optimizer, each_micro_batch, accumulation, scale
):
    """An infinite gradient skips the update even if clipping makes that gradient finite."""
    setting = Setting(scale=scale, accumulation=accumulation)
    training = ClippedTraining(optimizer, setting, attached=True)
    weights = copy.deepcopy(training.network.state_dict())
    training.bad_element.active = True

    def clip(training):
        # Only the first of several micro-batches has a non-finite gradient.
        training.bad_element.active = False
        return HIDING[way](training)

    batches = labelled_batches(accumulation)
    training.update(clip, batches, each_micro_batch=each_micro_batch)

    assert training.accelerator.optimizer_step_was_skipped
    assert training.step.last_output.overflow
    for name, weight in training.network.state_dict().items():
        assert torch.equal(weight, weights[name])
    # The overflow has no effect on later updates.
    assert_agree(clipped_alone(HIDING[way], optimizer, setting), training.run(HIDING[way]))


def test_accelerate_alone_lets_a_clamped_infinity_into_the_weights():
    """Accelerate alone updates weights with an infinite gradient that clipping made finite."""
    training = ClippedTraining("SGD", Setting(), attached=False)
    training.bad_element.active = True
    weight = training.network.layers[0].weight.detach()
    before = weight.clone()

    training.backward(labelled_batches(1)[0])
    value(training)
    training.optimizer.step()

    assert (weight - before)[0, 3].item() == pytest.approx(-0.05 * 0.02, rel=1e-4)
    assert weight.isfinite().all()


@each_scale
@pytest.mark.parametrize("optimizer", ["fused SGD", "SGD"])
@pytest.mark.parametrize(
    "change",
    [
        doubled,
        lambda t: t.network.layers[0].weight.grad.zero_(),
        lambda t: setattr(t.network.layers[0].weight, "grad", torch.ones(16, 8)),
        lambda t: setattr(t.network.layers[0].weight, "grad", None),
    ],
    ids=["all", "one", "replaced", "removed"],
)
def test_gradients_must_not_change_between_clipping_and_step(change, optimizer, scale):
    """Changing gradients between clipping and step raises an error, and no weight changes."""
    training = ClippedTraining(optimizer, Setting(scale=scale), attached=True)
    weights = copy.deepcopy(training.network.state_dict())
    training.backward(labelled_batches(1)[0])
    norm_of()(training)
    change(training)

    message = "gradients must not change between `clip_grad_norm_` and the optimizer's step"
    with pytest.raises(RuntimeError, match=message):
        training.optimizer.step()

    for name, weight in training.network.state_dict().items():
        assert torch.equal(weight, weights[name])
    training.optimizer.zero_grad()
    assert_agree(clipped_alone(norm_of(), optimizer), training.run(norm_of()))
