"""Training steps that a user writes by MindSpore's documentation."""

import torch
from torch import Tensor

from mfwrap import TrainOneStepCell, TrainOneStepWithLossScaleCell

__all__ = ["GuidesStep", "OverflowCheckedStep"]


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
        grads = [gradient / scaling_sens for gradient in grads]
        if self.checks_before_reduction:
            cond = self.get_overflow_status(status, grads)
        grads = self.grad_reducer(grads)
        if not self.checks_before_reduction:
            cond = self.get_overflow_status(status, grads)
        overflow = self.process_loss_scale(cond)
        if not overflow:
            self.apply_gradients(grads)
        return loss.detach(), cond, self.scale_sense.clone()
