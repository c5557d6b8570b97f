"""Training steps that a user writes by MindSpore's documentation."""

import torch
from torch import Tensor

from mfwrap import TrainOneStepCell, TrainOneStepWithLossScaleCell, value_and_grad

__all__ = ["AccumulatingStep", "AdversarialStep", "GuidesStep", "OverflowCheckedStep", "TupleStep"]


class GuidesStep(TrainOneStepCell):
    """The step that MindSpore's guide explains line by line."""

    def __call__(self, *inputs: Tensor) -> Tensor:
        loss = self.network(*inputs)
        sens = torch.full_like(loss, self.sens)
        grads = self.grad(self.network, self.weights)(*inputs, sens)
        grads = self.grad_reducer(grads)
        self.apply_gradients(grads)
        return loss.detach()


class OverflowCheckedStep(TrainOneStepWithLossScaleCell):
    """MindSpore's step with a loss scale.

    Attributes:
        checks_before_reduction: Check the gradients of this rank instead of the averages.
    """

    checks_before_reduction = False

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        loss = self.network(*inputs)
        scaling_sens = self.scale_sense
        status, scaling_sens = self.start_overflow_check(loss, scaling_sens)
        scaling_sens_filled = torch.ones_like(loss) * scaling_sens.to(loss.dtype)
        grads = self.grad(self.network, self.weights)(*inputs, scaling_sens_filled)
        grads = self.hyper_map(lambda gradient: gradient / scaling_sens, grads)
        if self.checks_before_reduction:
            cond = self.get_overflow_status(status, grads)
        grads = self.grad_reducer(grads)
        if not self.checks_before_reduction:
            cond = self.get_overflow_status(status, grads)
        overflow = self.process_loss_scale(cond)
        if not overflow:
            self.apply_gradients(grads)
        return loss.detach(), cond, self.scale_sense.clone()


class TupleStep(TrainOneStepCell):
    """A step of a network that returns a loss and logits; only the loss is differentiated."""

    def __call__(self, *inputs: Tensor) -> Tensor:
        loss, logits = self.network(*inputs)
        sens = (torch.full_like(loss, self.sens), torch.zeros_like(logits))
        grads = self.grad(self.network, self.weights)(*inputs, sens)
        self.apply_gradients(self.grad_reducer(grads))
        return loss.detach()


class AccumulatingStep(TrainOneStepCell):
    """MindSpore's step that accumulates: it updates once for each two calls."""

    def __call__(self, *inputs: Tensor) -> Tensor:
        loss, grads = value_and_grad(self.network, None, self.weights)(*inputs)
        grads = [gradient / 2 for gradient in grads]
        accumulated = getattr(self, "accumulated", None)
        if accumulated is None:
            self.accumulated = grads
        else:
            sums = [old + new for old, new in zip(accumulated, grads, strict=True)]
            self.apply_gradients(self.grad_reducer(sums))
            self.accumulated = None
        return loss


class AdversarialStep(TrainOneStepCell):
    """A step of two networks: a second cell trains the critic in the generator's step.

    Args:
        network: Network that returns the generator's loss.
        optimizer: Optimizer of the generator.
        critic: Cell that trains the critic.
    """

    def __init__(self, network, optimizer, critic: TrainOneStepCell) -> None:
        super().__init__(network, optimizer)
        self.critic = critic

    def __call__(self, *inputs: Tensor) -> Tensor:
        before = self.network(*inputs)
        self.critic(*inputs)
        grads = self.grad(self.network, self.weights)(*inputs, 1.0)
        self.apply_gradients(self.grad_reducer(grads))
        return before.detach()
