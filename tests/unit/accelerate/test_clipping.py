"""Clipping agrees with torch and, in an attached loop, with accelerate at any loss scale."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD

from mfwrap import StepConfig
from mfwrap.accelerate.clipping import clip_grad_norm, clip_grad_value
from mfwrap.accelerate.window import OptimizerWindow
from mfwrap.loss_scale.live import LossScale
from mfwrap.step.parameters import TrainedParameters
from mfwrap.step.update import StepUpdate
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
from support.host_reads import HostReads
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


SCALE = 2.0**10


class Weights:
    """Three weights with scaled gradients; the first and the second each have an optimizer."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.plain = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
        for weight in self.plain:
            weight.grad = torch.randn(3)
        self.scaled = copy.deepcopy(self.plain)
        for weight, plain in zip(self.scaled, self.plain, strict=True):
            weight.grad = plain.grad * SCALE
        self.loss_scale = LossScale(SCALE, torch.device("cpu"))
        self.windows = [self._window(weight) for weight in self.scaled[:2]]

    def _window(self, weight: nn.Parameter) -> OptimizerWindow:
        optimizer = SGD([weight], lr=1.0)
        parameters = TrainedParameters({"weight": weight}, optimizer, None)
        update = StepUpdate(parameters, optimizer, StepConfig(), self.loss_scale)
        window = OptimizerWindow(update, self.loss_scale.value)
        window.before_backward(torch.ones(()), 1)
        return window

    def clip(self, indices, max_norm=0.5, **settings):
        """Clip the gradients of the weights at these indices; return mfwrap's and torch's norm."""
        ours = clip_grad_norm(
            self.windows,
            (self.scaled[index] for index in indices),
            self.loss_scale.value,
            max_norm=max_norm,
            **settings,
        )
        chosen = [self.plain[index] for index in indices]
        return ours, clip_grad_norm_(chosen, max_norm, settings.get("norm_type", 2.0))

    def assert_steps_are_torchs(self) -> None:
        """Apply both updates and check that the weights decreased by torch's clipped gradients."""
        for window, weight, plain in zip(self.windows, self.scaled, self.plain, strict=False):
            window.apply(window.measured(), 1)
            torch.testing.assert_close(weight.detach(), -plain.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("may_fold", [True, False], ids=["folded", "in place"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("indices", [[0], [1], [0, 1], [1, 0], [0, 2], [0, 1, 2], [2]], ids=str)
def test_norm_and_update_are_torchs(indices, norm_type, may_fold):
    """Norm and updates equal torch's for any group of weights, with or without an optimizer.

    The tolerance covers a norm of nine numbers that are summed in another order, and one more
    rounding if the clip is folded.
    """
    weights = Weights()

    ours, theirs = weights.clip(indices, norm_type=norm_type, may_fold=may_fold)

    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    weights.assert_steps_are_torchs()


@pytest.mark.parametrize("norm_type", [2.0, float("inf")])
@pytest.mark.parametrize("indices", [[0, 1], [0, 2]], ids=str)
def test_clipping_twice_is_clipping_twice(indices, norm_type):
    """A second clip of other parameters by another limit and norm gives torch's result."""
    weights = Weights()

    weights.clip(indices, 1.0, norm_type=norm_type)
    ours, theirs = weights.clip([0], 0.1)

    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    weights.assert_steps_are_torchs()


def test_folding_leaves_the_gradients_alone():
    """A folded clip leaves the gradients unchanged, where a clip in place multiplies them."""
    folded, in_place = Weights(), Weights()
    before = [weight.grad.clone() for weight in folded.scaled]

    folded.clip([0, 1])
    in_place.clip([0, 1], may_fold=False)

    for weight, changed, gradient in zip(folded.scaled[:2], in_place.scaled, before, strict=False):
        assert torch.equal(weight.grad, gradient)
        assert not torch.equal(changed.grad, gradient)


@pytest.mark.parametrize("index", [0, 1])
def test_an_overflow_of_one_optimizer_skips_all_that_were_clipped_together(index):
    """An overflow in one optimizer's gradients skips all optimizers that share the norm."""
    weights = Weights()
    weights.scaled[index].grad[1] = torch.inf

    norm, _ = weights.clip([0, 1])
    outputs = [window.apply(window.measured(), 1).output for window in weights.windows]

    assert not norm.isfinite()
    assert [output.overflow.item() for output in outputs] == [True, True]
    assert not any(weight.detach().any() for weight in weights.scaled)


def test_what_has_no_gradient_has_norm_zero():
    """The norm is 0 if no parameter has a gradient."""
    weights = Weights()
    for weight in weights.scaled:
        weight.grad = None

    assert clip_grad_norm(weights.windows, weights.scaled, torch.ones(()), max_norm=1.0) == 0


@pytest.mark.parametrize("indices", [[0], [0, 1]], ids=str)
def test_elements_are_clamped_unscaled(indices):
    """Clipping by value clamps the unscaled elements, as torch does without a loss scale."""
    weights = Weights()

    clip_grad_value(weights.windows, (weights.scaled[index] for index in indices), 0.3)
    clip_grad_value_([weights.plain[index] for index in indices], 0.3)

    for index in indices:
        assert torch.equal(weights.scaled[index].grad, weights.plain[index].grad)
    weights.assert_steps_are_torchs()


@pytest.mark.parametrize("may_fold", [True, False], ids=["folded", "in place"])
def test_clipping_reads_nothing_on_the_host(may_fold):
    """Clipping, whether folded or in place, makes no host read."""
    weights = Weights()
    max_norm = 0.5

    with HostReads() as counted:
        clip_grad_norm(
            weights.windows,
            weights.scaled,
            weights.loss_scale.value,
            max_norm=max_norm,
            may_fold=may_fold,
        )

    assert counted.reads == []
