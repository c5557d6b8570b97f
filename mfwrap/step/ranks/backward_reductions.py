"""Reduce the gradient of one backward, and not the gradients that were accumulated before.

Under transformers' tensor parallelism, a norm may be applied to a part of the attention heads on
each rank (Qwen3's ``q_norm``). Its weight is the same on all ranks, but its gradient is a partial
sum. transformers adds up these sums in a hook, which torch calls after each backward has
accumulated into ``grad``: a hook of the parameter since transformers 5.22, of the module before.
From the second micro-batch of an update on, the hook therefore also adds up what the earlier
micro-batches have left there, which was added up already: with two ranks, the gradient of the first
of two micro-batches counts twice.

`reduce_before_accumulation` moves the reduction in front of the accumulation.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from mfwrap.compatibility.torch import backward_hooks, post_accumulate_hooks
from mfwrap.compatibility.transformers import reduces_partial_gradients

_REPAIRED: WeakSet[nn.Module] = WeakSet()
"""Modules whose parameters are repaired in each forward."""


def reduce_before_accumulation(network: nn.Module) -> None:
    """Make transformers reduce the gradients of each backward before they are accumulated.

    Other networks, and networks without such hooks, are not changed.

    Args:
        network: Network, with or without wrappers.
    """
    for module in network.modules():
        if module in _REPAIRED:
            continue
        hooks = backward_hooks(module)
        of_module = [key for key, hook in hooks.items() if reduces_partial_gradients(hook)]
        # Each of them repairs the parameters in the forward, because only then the module has the
        # parameters that get the gradients, which are not the optimizer's under `fully_shard`.
        for key in of_module:
            module.register_forward_hook(_ReductionOfModule(hooks.pop(key)))
        if reduces_partial_gradients(module.forward):
            module.register_forward_hook(_repair_parameters)
        elif not of_module:
            continue
        _REPAIRED.add(module)


def _repair_parameters(module: nn.Module, _arguments: object, _output: object) -> None:
    for parameter in module.parameters(recurse=False):
        hooks = post_accumulate_hooks(parameter)
        for key in [key for key, hook in hooks.items() if reduces_partial_gradients(hook)]:
            parameter.register_hook(_reduced_by(hooks.pop(key)))


class _ReductionOfModule:
    """Reduce the gradients of a module's parameters as a backward hook of the module does.

    Args:
        hook: Hook of transformers, which reduces the ``grad`` of all parameters in place.
    """

    def __init__(self, hook: Any) -> None:
        self._hook = hook
        self._hooked: Any = WeakIdKeyDictionary()

    def __call__(self, module: nn.Module, _arguments: object, _output: object) -> None:
        """After a forward, register a hook with each parameter that has none yet."""
        for parameter in module.parameters(recurse=False):
            if parameter.requires_grad and parameter not in self._hooked:
                parameter.register_hook(_reduced_by(self._reduce))
                self._hooked[parameter] = True

    def __deepcopy__(self, _: object) -> "_ReductionOfModule":
        # A copied parameter has no hooks, so a copy must register them again.
        return _ReductionOfModule(self._hook)

    def _reduce(self, stand_in: Any) -> None:
        self._hook(SimpleNamespace(parameters=lambda **_: [stand_in]), None, None)


def _reduced_by(reduce: Callable[[Any], None]) -> Callable[[Tensor], Tensor]:
    """Return a hook of a gradient from a function that reduces the ``grad`` of its argument."""

    def reduced(gradient: Tensor) -> Tensor:
        # Autograd may still need `gradient` itself.
        stand_in = SimpleNamespace(grad=gradient.clone())
        reduce(stand_in)
        result: Tensor = stand_in.grad
        return result

    return reduced
