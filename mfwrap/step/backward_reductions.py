"""Reduce the gradient of one backward, and not the gradients that were accumulated before.

Under transformers' tensor parallelism, a norm may be applied to a part of the attention heads on
each rank (Qwen3's ``q_norm``). Its weight is the same on all ranks, but its gradient is a partial
sum. transformers adds up these sums in a hook that torch calls after each backward has accumulated
into ``grad``. From the second micro-batch of an update on, the hook therefore also adds up what the
earlier micro-batches have left there, which was added up already: with two ranks, the gradient of
the first of two micro-batches counts twice.

`reduce_before_accumulation` moves the reduction in front of the accumulation.
"""

from types import SimpleNamespace
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn

_REPAIRED: WeakSet[nn.Module] = WeakSet()
"""Modules whose parameters are repaired in each forward."""


def reduce_before_accumulation(network: nn.Module) -> None:
    """Make transformers reduce the gradients of each backward before they are accumulated.

    Other networks, and networks without such hooks, are not changed.

    Args:
        network: Network, with or without wrappers.
    """
    for module in network.modules():
        if _is_of_transformers(module.forward) and module not in _REPAIRED:
            # transformers adds its hooks in the forward, because only then it has the parameters
            # that get the gradients, which are not the optimizer's under `fully_shard`.
            module.register_forward_hook(_repair)
            _REPAIRED.add(module)


def _is_of_transformers(function: Any) -> bool:
    # Do not import the class: it exists only in some versions of transformers.
    return getattr(function, "__qualname__", "").startswith("ReplicatedWithGradAllReduce.")


def _repair(module: nn.Module, _arguments: object, _output: object) -> None:
    for parameter in module.parameters(recurse=False):
        hooks: dict[int, Any] = parameter._post_accumulate_grad_hooks or {}
        for key in [key for key, hook in hooks.items() if _is_of_transformers(hook)]:
            parameter.register_hook(_Reduction(hooks.pop(key)))


class _Reduction:
    """Reduce a gradient with a hook that reduces the gradient of a parameter, in place.

    Args:
        hook: Hook of transformers.
    """

    def __init__(self, hook: Any) -> None:
        self._hook = hook

    def __call__(self, gradient: Tensor) -> Tensor:
        """Return the reduced gradient; autograd may still need `gradient` itself."""
        stand_in = SimpleNamespace(grad=gradient.clone())
        self._hook(stand_in)
        reduced: Tensor = stand_in.grad
        return reduced
