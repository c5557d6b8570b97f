"""Count the costs of a step other than time: host reads, memory traffic, temporary memory."""

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_READS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__")


class _HostReads(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_function__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        # `item()` inside `__float__` is one read, not two: the mode is off while `func` runs.
        self.count += getattr(func, "__name__", "") in _READS
        return func(*args, **(kwargs or {}))


def count_host_reads(step: Callable[[], None]) -> int:
    """Return how often `step` reads a value of a tensor on the host."""
    reads = _HostReads()
    with reads:
        step()
    return reads.count


class _Traffic(TorchDispatchMode):
    def __init__(self, larger_than: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # (torch has no annotations here)
        self._larger_than = larger_than
        self.num_bytes = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        del types
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view:
            return result
        schema = func._schema
        named = dict(zip((a.name for a in schema.arguments), args, strict=False)) | dict(kwargs)
        written = {
            argument.name
            for argument in schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
        }
        if named.get("grad_scale") is None:
            # The schema says that fused optimizers write the gradients. They do so only when they
            # divide the gradients by `grad_scale`.
            written.discard("grads")
        read = self._bytes(named.values())
        self.num_bytes += read + self._bytes(named[name] for name in written if name in named)
        if not written:
            self.num_bytes += self._bytes([result])
        return result

    def _bytes(self, values: Iterable[Any]) -> int:
        tensors = {
            leaf.data_ptr(): leaf.nbytes
            for leaf in tree_leaves(list(values))
            if isinstance(leaf, Tensor) and leaf.numel() > self._larger_than
        }
        return sum(tensors.values())


def count_traffic(step: Callable[[], None], *, larger_than: int) -> int:
    """Return the bytes that `step` reads and writes, kernel by kernel, as if nothing were cached.

    Args:
        step: Function to measure; called once.
        larger_than: Tensors of at most this many elements do not count.
    """
    traffic = _Traffic(larger_than)
    with traffic:
        step()
    return traffic.num_bytes


def transient_peak(step: Callable[[], None], device: torch.device) -> int:
    """Return the peak memory during `step`, in bytes, beyond the memory allocated before it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        step()
    events = profile.profiler.kineto_results.events()
    memory = [event for event in events if event.name() == "[memory]"]
    memory.sort(key=lambda event: event.start_ns())
    sizes: list[int] = [event.nbytes() for event in memory]
    return max(accumulate(sizes, initial=0))
