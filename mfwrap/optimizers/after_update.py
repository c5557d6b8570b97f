"""What acts after each applied update of an optimizer, between the optimizer and the average.

It is called by a hook of the optimizer's step, which torch calls also if the optimizer's kernels
have skipped the update on the device: `was_applied` tells. If the host skips the update, the
optimizer does not step, and the training step calls `discard_after_skip` instead.
"""

import abc
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim import Optimizer

from mfwrap.compatibility.torch import step_hooks
from mfwrap.optimizers.chained import parts_of
from mfwrap.tensors.shards import on_device


class AfterUpdate(abc.ABC):
    """What acts after each applied update, from what the forward passes of the update have shown.

    A method of it is a hook of the optimizer's step.
    """

    @abc.abstractmethod
    def discard(self) -> None:
        """Forget the forward passes since the last step; call it after a skipped update."""


def acting_after(optimizer: Optimizer) -> Iterator[AfterUpdate]:
    """Yield what acts after the steps of an optimizer or of its parts."""
    for each in dict.fromkeys((optimizer, *parts_of(optimizer))):
        for hook in step_hooks(each):
            owner = getattr(hook, "__self__", None)
            if isinstance(owner, AfterUpdate):
                yield owner


def was_applied(optimizer: Optimizer, device: torch.device) -> Tensor:
    """Return whether the optimizer's kernels have changed the weights; call it in a step's hook.

    Returns:
        Shape ``()``, bool, on `device`. Does not synchronize with the device.
    """
    applied = torch.ones((), dtype=torch.bool, device=device)
    for part in parts_of(optimizer):
        # The kernels of this optimizer have left the weights unchanged if the flag is 1.
        if (found_inf := getattr(part, "found_inf", None)) is not None:
            applied &= on_device(found_inf, device) == 0
    return applied
