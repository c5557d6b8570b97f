"""Pinned host memory of the simulated device, and copies that are in flight."""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from support.device.clocks import Timeline, copies_in_flight

_HARMLESS = {
    "__get__",
    "__set__",
    "copy_",
    "data_ptr",
    "dim",
    "is_pinned",
    "numel",
    "numpy",
    "pin_memory",
    "size",
    "untyped_storage",
}
"""Functions of a tensor that do not read its elements."""


class PinnedTensor(Tensor):
    """Host memory that the device can read and write without the host."""

    timeline: Timeline

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", str(func))
        given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)]
        if name not in _HARMLESS:
            for each in given:
                check_access(each, writes=name.endswith("_") or name == "__setitem__")
        elif name == "copy_" and args and isinstance(args[0], cls) and not _is_ours(args[1]):
            check_access(args[0], writes=True)
        if name == "numpy":
            with torch._C.DisableTorchFunctionSubclass():
                array = args[0].as_subclass(Tensor).numpy().view(WatchedArray)
            array.tensor = args[0]
            return array
        if name == "is_pinned":
            return True
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
        return _still_pinned(result, given)


def _still_pinned(result: Any, given: list[Any]) -> Any:
    """Return a view of pinned memory as pinned memory, and anything else as it is."""
    if isinstance(result, Tensor) and not isinstance(result, PinnedTensor):
        address = result.untyped_storage().data_ptr() if result.device.type == "cpu" else 0
        for each in given:
            if address and plain(each).untyped_storage().data_ptr() == address:
                view = result.as_subclass(PinnedTensor)
                view.timeline = each.timeline
                return view
    return result


def _is_ours(source: Any) -> bool:
    return isinstance(source, Tensor) and source.device.type != "cpu"


class WatchedArray(np.ndarray):
    """NumPy view of pinned memory, of which reads by element or as a whole are noticed."""

    tensor: Any = None

    def __array_finalize__(self, base: Any) -> None:
        self.tensor = getattr(base, "tensor", None)

    def _check(self, *, writes: bool = False) -> None:
        if self.tensor is not None:
            check_access(self.tensor, writes=writes)

    def __iter__(self) -> Any:
        self._check()
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        self._check()
        return super().__getitem__(index)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._check(writes=True)
        super().__setitem__(index, value)

    def __float__(self) -> float:
        self._check()
        return float(np.asarray(self).item())

    def tolist(self) -> Any:
        self._check()
        return super().tolist()

    def item(self, *args: Any) -> Any:
        self._check()
        return super().item(*args)


def pinned(tensor: Tensor, timeline: Timeline) -> Tensor:
    """Return a pinned copy of a tensor on the CPU."""
    copy = tensor.detach().clone().as_subclass(PinnedTensor)
    copy.timeline = timeline
    return copy


class Copy:
    """A copy between pinned memory and the device that is in flight.

    Args:
        memory: Pinned memory.
        values: Values that arrive in the memory; ``None`` if the copy reads the memory.
        timeline: Timeline of the device.
    """

    def __init__(self, memory: PinnedTensor, values: Tensor | None, timeline: Timeline) -> None:
        self._timeline = timeline
        self._stream = timeline.current
        self._position = self._stream.position
        self.memory = memory
        self.values = values
        self.event_is_set = False
        """Whether an event has been recorded after the copy."""
        if values is not None:
            plain(memory).copy_(torch.full_like(values, _poison(values.dtype)))
        copies_in_flight.append(self)

    def arrive(self) -> None:
        """Write the values if the host has waited for the copy."""
        if self._timeline.is_done(self._stream.number, self._position):
            copies_in_flight.remove(self)
            if self.values is not None:
                plain(self.memory).copy_(self.values)


def _poison(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point else 1


def plain(memory: Tensor) -> Tensor:
    """Return pinned memory as a tensor that may be used without a check."""
    with torch._C.DisableTorchFunctionSubclass():
        return memory.as_subclass(Tensor)


def arrive() -> None:
    """Let all copies arrive that the host has waited for."""
    for copy in list(copies_in_flight):
        copy.arrive()


def check_access(memory: Any, *, writes: bool) -> None:
    """Note a fault if the host uses pinned memory that a copy in flight uses."""
    address = plain(memory).untyped_storage().data_ptr()
    for copy in copies_in_flight:
        if plain(copy.memory).untyped_storage().data_ptr() != address:
            continue
        if copy.values is not None:
            memory.timeline.fault(
                "pinned buffer read early",
                "the host uses pinned memory before the copy into it has arrived",
            )
        elif writes:
            memory.timeline.fault(
                "pinned buffer written early",
                "the host writes pinned memory while a copy still reads it",
            )
