"""Time the sections of a loop with an attached step; see `mfwrap.collectives.clock`.

A loop calls its models itself, so a hook on each prepared model tells the clock when a forward
begins. The hooks are registered when somebody reads the times for the first time.

``torch.compile`` must not compile the hook, because reading a clock is a graph break, and an error
with ``fullgraph``. So the hook is on the module that ``prepare`` returned, not on the one inside.
``module.compile()`` compiles the hooks of a module, too: there `TimedForward` takes the place of
the compiled call. The forward counts as `Section.DATA` if the loop calls ``torch.compile`` for a
prepared module, or ``module.compile()`` after the first backward.
"""

from collections.abc import Callable
from typing import Any, final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from mfwrap.collectives import Section, section_clock
from mfwrap.compatibility.torch import compiled_call, set_compiled_call
from mfwrap.step.ranks.fsdp import ShardedParts
from mfwrap.step.ranks.waiting import time_replicas
from mfwrap.tensors.module_hooks import keep_out_of_copies
from mfwrap.tensors.wrappers import distributed_parts


@final
class LoopSections:
    """Tell the clock when forward and backward of an attached loop begin and end."""

    def __init__(self) -> None:
        self._untimed: WeakSet[nn.Module] = WeakSet()
        self._timed: WeakSet[nn.Module] = WeakSet()
        self._hooks: list[RemovableHandle] = []

    def see_model(self, prepared: nn.Module) -> None:
        """Record a model that ``prepare`` has returned, for the first time or again."""
        if prepared not in self._timed:
            self._untimed.add(prepared)

    def follow(self, loss: Tensor) -> None:
        """Follow the backward of a scaled loss, which is about to begin.

        Call it only if somebody reads the times.
        """
        if self._untimed:
            self._time_models()
        section_clock.switch(Section.FORWARD_BACKWARD)
        section_clock.follow_backward(loss)

    def _time_models(self) -> None:
        models = list(self._untimed)
        self._untimed.clear()
        self._timed.update(models)
        ShardedParts(*models).time_collectives()
        for model in models:
            time_replicas(distributed_parts(model))
            call = compiled_call(model)
            if call is None:
                self._hooks.append(model.register_forward_pre_hook(_begin_forward, prepend=True))
                keep_out_of_copies(model, self._hooks[-1])
            elif not isinstance(call, TimedForward):
                set_compiled_call(model, TimedForward(model, call))

    def detach(self) -> None:
        """Remove the hooks from the models."""
        for hook in self._hooks:
            hook.remove()


@final
class TimedForward:
    """Tell the clock that a forward begins, then call a module that was compiled in place.

    It stays in place when the step is detached, as long as the module is compiled.

    Args:
        model: The module.
        call: The module's compiled call.
    """

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        self._model = model
        self._call = call

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """Call the module, and return its result."""
        _begin_forward(self._model, arguments)
        return self._call(*arguments, **keywords)


def _begin_forward(model: nn.Module, _: Any) -> None:
    # If the loop compiles the prepared model, this function is compiled, too, and must do nothing.
    # An evaluation does not belong to a step.
    if not torch.compiler.is_compiling() and model.training:
        section_clock.switch(Section.FORWARD_BACKWARD)
