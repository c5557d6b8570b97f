"""Time the sections of a loop with an attached step; see `mfwrap.collectives.clock`.

A loop calls its models itself, so a hook on each prepared model tells the clock when a forward
begins. The hooks are registered when somebody reads the times for the first time.
"""

from collections.abc import Sequence
from typing import Any, final
from weakref import WeakSet

from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from mfwrap.collectives import Section, section_clock
from mfwrap.step.fsdp import ShardedParts
from mfwrap.step.waiting import time_replicas


@final
class LoopSections:
    """Tell the clock when forward and backward of an attached loop begin and end.

    Args:
        accelerator: Accelerator of the loop, with the models that it has prepared.
        parts: List of the prepared models' DistributedDataParallel modules, which the caller
            extends when it prepares another model. accelerate keeps the models without them.
    """

    def __init__(self, accelerator: Accelerator, parts: Sequence[DistributedDataParallel]) -> None:
        self._accelerator = accelerator
        self._parts = parts
        self._timed: WeakSet[nn.Module] = WeakSet()
        self._hooks: list[RemovableHandle] = []

    def follow(self, loss: Tensor) -> None:
        """Follow the backward of a scaled loss, which is about to begin.

        Call it only if somebody reads the times.
        """
        self._time_models()
        section_clock.switch(Section.FORWARD_BACKWARD)
        section_clock.follow_backward(loss)

    def _time_models(self) -> None:
        models = [*self._parts, *self._accelerator._models]
        models = [each for each in models if each not in self._timed]
        if not models:
            return
        time_replicas(self._parts)
        ShardedParts(*models).time_collectives()
        for model in models:
            self._timed.add(model)
            self._hooks.append(model.register_forward_pre_hook(_begin_forward, prepend=True))

    def detach(self) -> None:
        """Remove the hooks from the models."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._timed.clear()


def _begin_forward(model: nn.Module, _: Any) -> None:
    # An evaluation does not belong to a step.
    if model.training:
        section_clock.switch(Section.FORWARD_BACKWARD)
