"""The losses of steps over all ranks."""

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor, distributed

from mfwrap.callbacks.shared.step_values import PackedValues

__all__ = ["over_ranks"]


@torch.no_grad()
def over_ranks(steps: Sequence[PackedValues]) -> list[PackedValues]:
    """Put the mean over ranks in the place of this rank's losses, with one message for all steps.

    Every rank has to call it, for the same steps. A loss that is not finite though the step's
    gradients are is left out: that of a rank whose batch has no target.

    Args:
        steps: ``n`` of them, at least one, which all have a loss.

    Returns:
        As many, with tensors of their own. Does not wait for the device, unless the process group
        does, as gloo.
    """
    losses = torch.stack([_value(step, "loss") for step in steps])
    overflows = torch.stack([_value(step, "overflow") for step in steps])
    counts = losses.isfinite() | overflows.bool()
    message = torch.stack((torch.where(counts, losses, 0.0), counts.float()))
    distributed.all_reduce(message)
    total, number = message
    return [
        dataclasses.replace(step, tensor=_with_loss(step, mean))
        for step, mean in zip(steps, (total / number).unbind(), strict=True)
    ]


def _value(step: PackedValues, name: str) -> Tensor:
    if name in step.names:
        return step.tensor[step.names.index(name)]
    return step.tensor.new_zeros(())


def _with_loss(step: PackedValues, loss: Tensor) -> Tensor:
    values = list(step.tensor.unbind())
    values[step.names.index("loss")] = loss
    return torch.stack(values)
