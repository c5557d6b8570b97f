"""Tensors of the simulated device, and what each operator does to their memory."""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from support.device.clocks import Memory, Timeline
from support.device.graphs import Recorder
from support.device.pinned import Copy, PinnedTensor, pinned, plain

_DATA_DEPENDENT = {
    "aten::_local_scalar_dense",
    "aten::_unique2",
    "aten::bincount",
    "aten::equal",
    "aten::is_nonzero",
    "aten::masked_select",
    "aten::nonzero",
    "aten::repeat_interleave.Tensor",
    "aten::unique_consecutive",
    "aten::unique_dim",
}
"""Operators whose result, or its shape, the host must wait for."""


class SimulatedTensor(Tensor):
    """Tensor of the device, for which a tensor on the CPU stands.

    Args:
        raw: Tensor on the CPU.
        memory: Memory that it shares.
        device: The device.
    """

    raw: Tensor
    memory: Memory
    runtime: "Runtime"

    @staticmethod
    def __new__(cls, raw: Tensor, memory: Memory, runtime: "Runtime") -> Self:
        value = Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=runtime.device,
        )
        value.raw, value.memory, value.runtime = raw, memory, runtime
        return value

    # Calls of the device's tensors are calls of plain tensors until they reach the operators.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, cls)]
        return given[0].runtime.call(func, args, kwargs or {})

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"SimulatedTensor({self.raw})"

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        self.memory.record_stream(stream)

    def data_ptr(self) -> int:
        return self.raw.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.raw.untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        # A saved tensor is on the CPU when it is loaded.
        return self.cpu().__reduce_ex__(protocol)


class Runtime:
    """Run operators on the device.

    Args:
        device: The device.
        timeline: Its timeline.
    """

    def __init__(self, device: torch.device, timeline: Timeline) -> None:
        self.device = device
        self.recorder = Recorder(timeline)
        self.spoil: Callable[[str, Any], None] = lambda _name, _result: None
        """Called with the name and the result of each operator; may change the result in place."""
        self._timeline = timeline

    def is_ours(self, value: Any) -> bool:
        return isinstance(value, SimulatedTensor)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an operator."""
        name = func.name().removesuffix(".default")
        if name == "aten::copy_":
            return self._copy(*args, **kwargs)
        if name == "aten::_to_copy" and self._leaves(args, kwargs):
            return self._to_host(*args, **kwargs)
        self._note_reads(name, args, kwargs)
        return self._run(func, name, args, kwargs)

    def _leaves(self, args: Any, kwargs: Any) -> bool:
        target = kwargs.get("device")
        return self.is_ours(args[0]) and target is not None and torch.device(target).type == "cpu"

    def _note_reads(self, name: str, args: Any, kwargs: Any) -> None:
        by_mask = name.startswith(("aten::index.", "aten::index_put")) and any(
            isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1])
        )
        checks = name == "aten::segment_reduce" and not kwargs.get("unsafe", False)
        if name in _DATA_DEPENDENT or by_mask or checks:
            self._timeline.read(name)

    def _run(self, func: Any, name: str, args: Any, kwargs: Any) -> Any:
        ours = [x for x in tree_leaves((args, kwargs)) if self.is_ours(x)]
        raw_args, raw_kwargs = tree_map(self._raw, (args, kwargs))
        written = self._written(func, args, kwargs)
        if not func.is_view:
            self.recorder.before(name, ours, written)
        result = func(*raw_args, **raw_kwargs)
        self.spoil(name, result)
        by_raw = {id(x.raw): x for x in ours}
        memories = {x.raw.untyped_storage().data_ptr(): x.memory for x in ours if x.numel()}
        if not func.is_view:
            self._timeline.current.queue()
            self.recorder.record(lambda: func(*raw_args, **raw_kwargs), result)
            for x in ours:
                x.memory.use(name, writes=any(x is each for each in written))
            for x in written:
                if x.shape != x.raw.shape:  # an `out` that the operator has resized
                    x.data = self.new(x.raw, x.memory)
        return tree_map(lambda x: self._wrap(x, by_raw, memories), result)

    def _written(self, func: Any, args: Any, kwargs: Any) -> list[Any]:
        schema = func._schema.arguments
        given = dict(zip((a.name for a in schema), args, strict=False)) | dict(kwargs)
        if func.name().startswith("aten::_fused_") and given.get("grad_scale") is None:
            # The schema says that fused optimizers write the gradients. They do so only when they
            # divide them.
            given.pop("grads", None)
        names = [a.name for a in schema if a.alias_info is not None and a.alias_info.is_write]
        return [x for name in names for x in tree_leaves(given.get(name)) if self.is_ours(x)]

    def _raw(self, value: Any) -> Any:
        if self.is_ours(value):
            return value.raw
        if isinstance(value, PinnedTensor):
            return plain(value)
        if isinstance(value, torch.device) and value.type == self.device.type:
            return torch.device("cpu")
        return value

    def _wrap(self, value: Any, by_raw: dict[int, Any], memories: dict[int, Memory]) -> Any:
        if not isinstance(value, Tensor):
            return value
        if id(value) in by_raw:
            return by_raw[id(value)]
        memory = memories.get(value.untyped_storage().data_ptr()) if value.numel() else None
        return self.new(value, memory)

    def new(self, raw: Tensor, memory: Memory | None = None) -> Tensor:
        """Return a tensor of the device; ``None`` allocates memory, which the operator writes."""
        if memory is None:
            memory = Memory(self._timeline, raw.untyped_storage().nbytes())
            memory.use("its creation", writes=True)
            self.recorder.allocated(memory)
        return SimulatedTensor(raw, memory, self)

    def _copy(self, target: Any, source: Any, non_blocking: bool = False) -> Any:  # noqa: FBT001, FBT002  (torch's signature)
        if not target.numel():
            return target
        self._timeline.current.queue()
        if self.is_ours(target) and self.is_ours(source):
            self.recorder.before("aten::copy_", [target, source], [target])
            source.memory.use("aten::copy_", writes=False)
            target.memory.use("aten::copy_", writes=True)
            target.raw.copy_(source.raw)
            self.recorder.record(lambda: target.raw.copy_(source.raw), target.raw)
            return target
        if self.is_ours(target):
            target.memory.use("aten::copy_", writes=True)
            target.raw.copy_(plain(source) if isinstance(source, PinnedTensor) else source)
            if not isinstance(source, PinnedTensor):
                self._timeline.synchronize("copy from unpinned memory", self._now())
            elif non_blocking:
                Copy(source, None, self._timeline)
            else:
                self._timeline.synchronize("blocking copy to the device", self._now())
            return target
        source.memory.use("aten::copy_", writes=False)
        if isinstance(target, PinnedTensor) and non_blocking:
            Copy(target, source.raw.to(target.dtype).expand(target.shape).clone(), self._timeline)
            return target
        what = "copy" if isinstance(target, PinnedTensor) else "copy to unpinned memory"
        self._timeline.read(f"aten::copy_ ({what})")
        (plain(target) if isinstance(target, PinnedTensor) else target).copy_(source.raw)
        return target

    def _now(self) -> dict[int, int]:
        return self._timeline.current.clock()

    def _to_host(self, source: Any, *, non_blocking: bool = False, **keywords: Any) -> Tensor:
        dtype = keywords.get("dtype") or source.dtype
        values = source.raw.to(dtype, copy=True)
        self._timeline.current.queue()
        source.memory.use("aten::_to_copy", writes=False)
        if not non_blocking:
            self._timeline.read("aten::_to_copy")
            return values
        # torch makes the result pinned.
        target = pinned(torch.zeros_like(values), self._timeline)
        Copy(target, values, self._timeline)
        return target
