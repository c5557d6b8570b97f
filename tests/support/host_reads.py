"""Count the host's reads of tensors on CPU, where no read shows as a wait."""

import contextlib
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["HostRead", "HostReads"]

aten = torch.ops.aten

_METHODS = frozenset(
    {
        "item",
        "tolist",
        "numpy",
        "cpu",
        "__bool__",
        "__float__",
        "__int__",
        "__index__",
        "__complex__",
        "__array__",
        "__dlpack__",
        "__format__",
    }
)
_OPERATORS = frozenset(
    {
        aten._local_scalar_dense,
        aten.nonzero,
        aten.masked_select,
        aten.equal,
        aten.allclose,
        aten._unique,
        aten._unique2,
        aten.unique_dim,
        aten.unique_consecutive,
        aten.bincount,
        # `torch.tensor(value)`: on its way to a device it is waited for.
        aten.lift_fresh,
    }
)
_WITH_MASK = frozenset({aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_})
_TORCH = Path(torch.__file__).parent
_STACK_DEPTH = 4


class HostRead(NamedTuple):
    """One read."""

    name: str
    """The method that was called, or the operator that torch dispatched."""

    stack: tuple[str, ...]
    """Where, outside of torch, innermost first."""


class HostReads:
    """Collect what reads a tensor's values on the host, within a ``with`` block.

    On a device each of these waits until the values are there. A copy to the host that is told
    not to block does not wait, and counts when its values are read with torch. `torch.Event`,
    numpy views taken before and ``data_ptr`` are not seen.

    Two modes, because neither sees all: ``tolist``, ``cpu``, ``to`` and ``numpy`` dispatch no
    operator that betrays them on CPU, and a tensor given as a number is read below Python.
    """

    def __init__(self) -> None:
        self.reads: list[HostRead] = []
        self._within_read = False
        self._modes = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._modes.enter_context(_Operators(self._see))
        self._modes.enter_context(_Functions(self._see))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._modes.close()

    @property
    def names(self) -> list[str]:
        """Names of the reads, in their order."""
        return [read.name for read in self.reads]

    def _see(self, name: str | None, call: Callable[[], Any]) -> Any:
        """Make a call, and count it if it has a name and is no part of a counted one."""
        if name is None or self._within_read:
            return call()
        self.reads.append(HostRead(name, _stack()))
        self._within_read = True
        try:
            return call()
        finally:
            self._within_read = False


class _Functions(TorchFunctionMode):
    def __init__(self, see: Callable[[str | None, Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._see = see

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        method = getattr(func, "__name__", "")
        reads = method in _METHODS or (method == "to" and _waits_for_host(args[1:], keywords))
        return self._see(method if reads else None, lambda: func(*args, **keywords))


class _Operators(TorchDispatchMode):
    def __init__(self, see: Callable[[str | None, Callable[[], Any]], Any]) -> None:
        super().__init__()
        self._see = see

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        operator = func.overloadpacket
        reads = (
            operator in _OPERATORS
            or (operator in _WITH_MASK and _has_mask(args[1]))
            or (operator is aten.repeat_interleave and keywords.get("output_size") is None)
            or _copies_to_host(operator, args, keywords)
        )
        name = operator._qualified_op_name if reads else None
        return self._see(name, lambda: func(*args, **keywords))


def _waits_for_host(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Tell whether arguments of ``Tensor.to`` ask for a blocking copy to the CPU."""
    device = keywords.get("device", arguments[0] if arguments else None)
    if not isinstance(device, (str, torch.device)) or torch.device(device).type != "cpu":
        return False
    # to(device, dtype, non_blocking): the only bool there is, but for `copy` behind it.
    flags = [argument for argument in arguments if isinstance(argument, bool)]
    non_blocking = keywords.get("non_blocking", flags[0] if flags else False)
    # torch's optimizers move scalars to their parameters' own device, on CPU the same word.
    return not non_blocking and "optim" not in _calling_package()


def _copies_to_host(operator: Any, args: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    if operator is aten._to_copy:
        target, source = keywords.get("device"), args[0]
        blocking = not keywords.get("non_blocking", False)
    elif operator is aten.copy_:
        target, source = args[0].device, args[1]
        blocking = not (args[2] if len(args) > 2 else keywords.get("non_blocking", False))
    else:
        return False
    to_host = target is not None and torch.device(target).type == "cpu"
    return blocking and to_host and source.device.type != "cpu"


def _has_mask(indices: Sequence[Tensor | None]) -> bool:
    return any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)


def _frames() -> list[FrameType]:
    """Return the frames outside of this file, innermost first."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            frames.append(frame)
        frame = frame.f_back
    return frames


def _calling_package() -> tuple[str, ...]:
    """Return the folders of torch that the innermost frame is in; none outside of torch."""
    path = Path(_frames()[0].f_code.co_filename)
    return path.relative_to(_TORCH).parts[:-1] if path.is_relative_to(_TORCH) else ()


def _stack() -> tuple[str, ...]:
    outside = [f for f in _frames() if not Path(f.f_code.co_filename).is_relative_to(_TORCH)]
    return tuple(
        f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        for frame in outside[:_STACK_DEPTH]
    )
