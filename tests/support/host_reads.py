"""Count host reads of tensors on a CPU, where no synchronization reveals them."""

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
        # Dispatched by `torch.tensor(value)`, which synchronizes if it copies to a device.
        aten.lift_fresh,
    }
)
_WITH_MASK = frozenset({aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_})
_TORCH = Path(torch.__file__).parent
_STACK_DEPTH = 4


class HostRead(NamedTuple):
    """A read of a tensor's values on the host."""

    name: str
    """Name of the method that was called, or of the operator that torch dispatched."""

    stack: tuple[str, ...]
    """Call stack outside of torch, innermost frame first, as ``file:line function``."""


class HostReads:
    """Collect the host reads of tensors within a ``with`` block.

    On a device, each of these reads synchronizes. A non-blocking copy to the host does not, and
    is counted only when torch reads its values. Waiting for a `torch.Event`, reading a numpy view
    made before the block, and ``data_ptr`` are not detected.

    Two torch modes are needed because neither detects all reads. On a CPU, ``tolist``, ``cpu``,
    ``to`` and ``numpy`` dispatch no operator that would reveal them, so the function mode detects
    them by name. A tensor passed in place of a number is read in C++, so only the dispatch mode
    detects it.
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
        """Names of the reads, in order."""
        return [read.name for read in self.reads]

    def _see(self, name: str | None, call: Callable[[], Any]) -> Any:
        """Run a call, and collect it as a host read with this name.

        A call whose name is None, or that runs within another host read, is not collected.
        """
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
            or (operator is aten.segment_reduce and not keywords.get("unsafe", False))
            or _copies_to_host(operator, args, keywords)
        )
        name = operator._qualified_op_name if reads else None
        return self._see(name, lambda: func(*args, **keywords))


def _waits_for_host(arguments: Sequence[Any], keywords: Mapping[str, Any]) -> bool:
    """Return whether the arguments of ``Tensor.to`` request a blocking copy to the CPU."""
    device = keywords.get("device", arguments[0] if arguments else None)
    if not isinstance(device, (str, torch.device)) or torch.device(device).type != "cpu":
        return False
    # In to(device, dtype, non_blocking, copy), `non_blocking` is the first bool.
    flags = [argument for argument in arguments if isinstance(argument, bool)]
    non_blocking = keywords.get("non_blocking", flags[0] if flags else False)
    # Leave out torch's optimizers, which move scalars to the device of their parameters. On a CPU
    # this looks like a copy to the host, but on a GPU it is a copy to the device.
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
    """Return the calling frames outside of this file, innermost first."""
    frames, frame = [], sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename != __file__:
            frames.append(frame)
        frame = frame.f_back
    return frames


def _calling_package() -> tuple[str, ...]:
    """Return the folders below torch of the file that made the call; () outside of torch."""
    path = Path(_frames()[0].f_code.co_filename)
    return path.relative_to(_TORCH).parts[:-1] if path.is_relative_to(_TORCH) else ()


def _stack() -> tuple[str, ...]:
    outside = [f for f in _frames() if not Path(f.f_code.co_filename).is_relative_to(_TORCH)]
    return tuple(
        f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"
        for frame in outside[:_STACK_DEPTH]
    )
