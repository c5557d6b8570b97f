"""Look at what the modules of a network receive and return, as long as that is asked for."""

import contextlib
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple, Self

from torch import Tensor, nn

from mfwrap.tensors.module_hooks import keep_out_of_copies


class Value(NamedTuple):
    """Name of a value of a step."""

    what: str
    name: str
    """Module, weight or input."""

    number: int = 0
    """Number of the call of the module."""


class ModuleCall(NamedTuple):
    """One call of a module."""

    name: str
    number: int
    module: nn.Module

    def value(self, what: str) -> Value:
        """Return the name of a value of the call."""
        return Value(what, self.name, self.number)


class ModuleCalls:
    """Call three methods with what modules receive and return, until it is closed.

    Hooks run in the order of their registration. `made` sees an output before other hooks;
    `received` and `returned` see inputs and output after any change by them.

    Args:
        modules: Names and modules.
    """

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self._handles = contextlib.ExitStack()
        self._numbers: dict[str, int] = {}
        for name, module in modules:
            hooks = (
                module.register_forward_pre_hook(partial(self._begin, name), with_kwargs=True),
                module.register_forward_hook(partial(self._make, name), prepend=True),
                module.register_forward_hook(partial(self._end, name)),
            )
            for hook in hooks:
                self._handles.callback(hook.remove)
            keep_out_of_copies(module, *hooks)

    def received(self, call: ModuleCall, arguments: Any) -> Any:
        """Look at the arguments of a call, positional ones and keywords; may return others."""

    def made(self, call: ModuleCall, inputs: tuple[Any, ...], output: Any) -> None:
        """Look at what the forward has made."""

    def returned(self, call: ModuleCall, output: Any) -> Any:
        """Look at what the module has returned; may return another output."""

    def follow(self, tensor: Tensor, look: Any) -> None:
        """Call a function with the gradient of a tensor."""
        self._handles.callback(tensor.register_hook(look).remove)

    def follow_made(self, tensor: Tensor, look: Any) -> None:
        """As `follow`, after all hooks of the tensor, which an operation must have made."""
        node, place = tensor.grad_fn, tensor.output_nr
        assert node is not None  # noqa: S101  (for mypy)
        self._handles.callback(node.register_prehook(lambda found: look(found[place])).remove)

    def close(self) -> None:
        """Remove all hooks."""
        self._handles.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _begin(self, name: str, module: nn.Module, positional: Any, keywords: Any) -> Any:
        self._numbers[name] = self._numbers.get(name, -1) + 1
        return self.received(self._call(name, module), (positional, keywords))

    def _make(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        self.made(self._call(name, module), inputs, output)

    def _end(self, name: str, module: nn.Module, _: Any, output: Any) -> Any:
        return self.returned(self._call(name, module), output)

    def _call(self, name: str, module: nn.Module) -> ModuleCall:
        # A hook that begins a call may have made this object, too late to see that call begin.
        return ModuleCall(name, self._numbers.get(name, 0), module)
