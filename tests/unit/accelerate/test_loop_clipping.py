"""Clipping behind several optimizers, against torch's on the same gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from torch.optim import SGD

from mfwrap import StepConfig
from mfwrap.accelerate.clipping import clip_grad_norm, clip_grad_value
from mfwrap.accelerate.optimizer_window import OptimizerWindow
from mfwrap.loss_scale.live import LossScale
from mfwrap.step.parameters import TrainedParameters
from mfwrap.step.update import StepUpdate
from support.host_reads import HostReads

CPU = torch.device("cpu")
SCALE = 2.0**10


class Weights:
    """Two weights with an optimizer each, and a third one with none; gradients are scaled."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.plain = [nn.Parameter(torch.zeros(3)) for _ in range(3)]
        for weight in self.plain:
            weight.grad = torch.randn(3)
        self.scaled = copy.deepcopy(self.plain)
        for weight, plain in zip(self.scaled, self.plain, strict=True):
            weight.grad = plain.grad * SCALE
        self.loss_scale = LossScale(SCALE, CPU)
        self.windows = [self._window(weight) for weight in self.scaled[:2]]

    def _window(self, weight: nn.Parameter) -> OptimizerWindow:
        optimizer = SGD([weight], lr=1.0)
        parameters = TrainedParameters({"weight": weight}, optimizer, None)
        update = StepUpdate(parameters, optimizer, StepConfig(), self.loss_scale)
        window = OptimizerWindow(update, self.loss_scale.value)
        window.before_backward(torch.ones(()), 1)
        return window

    def clip(self, indices, max_norm=0.5, **settings):
        """Clip the gradients of these weights; return our norm and torch's."""
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
        """Do both updates, and fail unless the weights fell by torch's clipped gradients."""
        for window, weight, plain in zip(self.windows, self.scaled, self.plain, strict=False):
            window.apply(1)
            torch.testing.assert_close(weight.detach(), -plain.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("may_fold", [True, False], ids=["folded", "in place"])
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("indices", [[0], [1], [0, 1], [1, 0], [0, 2], [0, 1, 2], [2]], ids=str)
def test_norm_and_update_are_torchs(indices, norm_type, may_fold):
    """Whichever weights are clipped together, one in no optimizer among them.

    A norm of nine numbers in another order, and one more rounding where it is folded.
    """
    weights = Weights()

    ours, theirs = weights.clip(indices, norm_type=norm_type, may_fold=may_fold)

    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    weights.assert_steps_are_torchs()


@pytest.mark.parametrize("indices", [[0, 1], [0, 2]], ids=str)
def test_clipping_twice_is_clipping_twice(indices):
    """The second time by another limit, of another selection."""
    weights = Weights()

    weights.clip(indices, 1.0)
    ours, theirs = weights.clip([0], 0.1)

    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    weights.assert_steps_are_torchs()


def test_folding_leaves_the_gradients_alone():
    """The step's own pass multiplies them; in place they are multiplied at once."""
    folded, in_place = Weights(), Weights()
    before = [weight.grad.clone() for weight in folded.scaled]

    folded.clip([0, 1])
    in_place.clip([0, 1], may_fold=False)

    for weight, changed, gradient in zip(folded.scaled[:2], in_place.scaled, before, strict=False):
        assert torch.equal(weight.grad, gradient)
        assert not torch.equal(changed.grad, gradient)


@pytest.mark.parametrize("index", [0, 1])
def test_an_overflow_of_one_optimizer_skips_all_that_were_clipped_together(index):
    """Their common norm is not finite; a step by it would spread that."""
    weights = Weights()
    weights.scaled[index].grad[1] = torch.inf

    norm, _ = weights.clip([0, 1])
    outputs = [window.apply(1).output for window in weights.windows]

    assert not norm.isfinite()
    assert [output.overflow.item() for output in outputs] == [True, True]
    assert not any(weight.detach().any() for weight in weights.scaled)


def test_what_has_no_gradient_has_norm_zero():
    """As with torch."""
    weights = Weights()
    for weight in weights.scaled:
        weight.grad = None

    assert clip_grad_norm(weights.windows, weights.scaled, torch.ones(()), max_norm=1.0) == 0


@pytest.mark.parametrize("indices", [[0], [0, 1]], ids=str)
def test_elements_are_clamped_unscaled(indices):
    """As torch clamps them where nothing is scaled."""
    weights = Weights()

    clip_grad_value(weights.windows, (weights.scaled[index] for index in indices), 0.3)
    clip_grad_value_([weights.plain[index] for index in indices], 0.3)

    for index in indices:
        assert torch.equal(weights.scaled[index].grad, weights.plain[index].grad)
    weights.assert_steps_are_torchs()


@pytest.mark.parametrize("may_fold", [True, False], ids=["folded", "in place"])
def test_clipping_reads_nothing_on_the_host(may_fold):
    """Neither the norm nor the coefficient."""
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
