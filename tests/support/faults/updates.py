"""Plant faults into the updates of an optimizer, and into the gradients that it takes."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from support.faults.faults import Fault, How

__all__ = ["KeptGradients", "PlantedUpdates"]


class PlantedUpdates:
    """Leave updates out, or repeat them.

    Args:
        optimizer: Optimizer.
        weights: Weights whose updates have the fault.
        fault: Fault.
    """

    def __init__(self, optimizer: Optimizer, weights: Sequence[Tensor], fault: Fault) -> None:
        self._optimizer, self._weights, self._fault = optimizer, weights, fault
        self._gradients: list[Tensor | None] = []
        self.is_on = False
        """Whether the updates of this step have the fault."""

        optimizer.register_step_pre_hook(self._before)
        optimizer.register_step_post_hook(self._after)

    def _before(self, *_: Any) -> None:
        if self.is_on and self._fault.kind.how is How.MISSING:
            # An optimizer passes over a weight without a gradient.
            self._gradients = [weight.grad for weight in self._weights]
            for weight in self._weights:
                weight.grad = None

    def _after(self, *_: Any) -> None:
        if not self.is_on:
            return
        if self._fault.kind.how is How.MISSING:
            for weight, gradient in zip(self._weights, self._gradients, strict=True):
                weight.grad = gradient
            return
        step: Any = type(self._optimizer).step
        for _ in range(round(self._fault.size) - 1):
            # The step without its hooks, which would come back here.
            step.__wrapped__(self._optimizer)


class KeptGradients:
    """Add the gradients of the step before, as a loop does that does not set them to zero.

    Args:
        network: Network without wrappers.
        optimizer: Optimizer, whose step ends what is added up.
    """

    def __init__(self, network: nn.Module, optimizer: Optimizer) -> None:
        self._old: dict[Tensor, Tensor] = {}
        self._new: dict[Tensor, Tensor] = {}
        self._is_on = self._is_in_step = False
        for weight in network.parameters():
            if weight.requires_grad:
                weight.register_hook(lambda gradient, weight=weight: self._sum(weight, gradient))
        optimizer.register_step_pre_hook(self._end)

    def begin_step(self, *, is_on: bool) -> None:
        """Begin a step, which has the fault or not."""
        self._is_on, self._is_in_step = is_on, True
        self._old, self._new = self._new, {}

    def _end(self, *_: Any) -> None:
        # A replay, between the steps, begins with gradients of zero.
        self._is_in_step = False

    def _sum(self, weight: Tensor, gradient: Tensor) -> Tensor:
        if not self._is_in_step:
            return gradient
        with torch.no_grad():
            if weight in self._new:
                self._new[weight] = self._new[weight] + gradient
                return gradient
            # What is kept is there before the first micro-batch.
            kept = gradient
            if self._is_on and weight in self._old:
                kept = gradient + self._old[weight]
            self._new[weight] = kept
            return kept
