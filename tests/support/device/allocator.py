"""The caching allocator of the simulated device: its numbers, retries and errors."""

from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

__all__ = ["Allocator"]

GRAIN = 512
"""Bytes of the smallest block, as of CUDA."""


class Allocator:
    """Count the memory of tensors, and keep the blocks of freed ones, as CUDA's allocator does.

    A block is used again for a request of the same size. If the device is full, the blocks that are
    kept are given back, and the request is tried again.
    """

    def __init__(self) -> None:
        self.capacity = 2**40
        """Memory of the device, in bytes."""
        self._kept: Counter[int] = Counter()
        self._bytes = {name: {"current": 0, "peak": 0} for name in ("allocated", "reserved")}
        self.num_retries = 0
        self.num_resets = 0
        """How often somebody has reset the peaks."""
        self.history: list[Any] = []
        """Settings of the calls that start or stop the history of allocations."""

    def allocate(self, num_bytes: int) -> int:
        """Take a block, and return its size.

        Raises:
            OutOfMemoryError: If the device is full.
        """
        size = max(1, -(-num_bytes // GRAIN)) * GRAIN
        reserved = self._bytes["reserved"]
        if self._kept[size]:
            self._kept[size] -= 1
        else:
            if reserved["current"] + size > self.capacity:
                self.num_retries += 1
                self._give_back()
            if reserved["current"] + size > self.capacity:
                msg = f"SIMULATED out of memory. Tried to allocate {size} bytes."
                raise torch.OutOfMemoryError(msg)
            self._add("reserved", size)
        self._add("allocated", size)
        return size

    def _give_back(self) -> None:
        self._bytes["reserved"]["current"] -= sum(size * n for size, n in self._kept.items())
        self._kept.clear()

    def fill(self) -> None:
        """Leave no memory for another tensor."""
        self._give_back()
        self.capacity = 0

    def free(self, size: int) -> None:
        """Keep a block of a tensor that is gone."""
        self._kept[size] += 1
        self._add("allocated", -size)

    def _add(self, name: str, size: int) -> None:
        counts = self._bytes[name]
        counts["current"] += size
        counts["peak"] = max(counts["peak"], counts["current"])

    def stats(self, _device: Any = None) -> dict[str, Any]:
        """Return what ``torch.cuda.memory_stats_as_nested_dict`` returns, as far as it is used."""
        of_pools = {f"{name}_bytes": {"all": dict(n)} for name, n in self._bytes.items()}
        return {**of_pools, "num_alloc_retries": self.num_retries}

    def reset(self, _device: Any = None) -> None:
        self.num_resets += 1
        for counts in self._bytes.values():
            counts["peak"] = counts["current"]

    def join(self, module: Any) -> None:
        """Give the device's module the functions that ``torch.cuda`` has."""
        module.memory_stats_as_nested_dict = self.stats
        module.reset_peak_memory_stats = self.reset
        module.get_device_properties = lambda *_: SimpleNamespace(total_memory=self.capacity)
        module.memory = SimpleNamespace(
            _record_memory_history=lambda **settings: self.history.append(settings),
            _dump_snapshot=lambda file: Path(file).write_text(str(self.stats()), encoding="utf-8"),
        )
