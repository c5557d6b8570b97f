"""Graphs of the simulated device: operators that are recorded once and replayed.

A replay runs the recorded operators again, from and into the memory that they had at the capture.
So a value that the host has changed since, or that is kept in a new tensor instead of the old one,
is not seen, as on CUDA.
"""

import weakref
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from support.device.clocks import Memory, Timeline


class Graph:
    """Stand in for ``torch.accelerator.Graph``.

    Args:
        recorder: Notes the operators of the device while a graph is captured.
        settings: Ignored.
    """

    def __init__(self, recorder: "Recorder", **settings: Any) -> None:
        del settings
        self._recorder = recorder
        self.operators: list[Callable[[], None]] = []
        self.own: list[Memory] = []
        """Memory that was allocated in the capture, which only the graph frees."""

        self.foreign: dict[int, tuple[weakref.ref[Memory], str]] = {}
        """Memory from before the capture, and the first operator that uses it."""

        self.uses: list[tuple[weakref.ref[Memory], str, bool]] = []
        self._before: dict[int, tuple[Tensor, Tensor]] = {}

    def __enter__(self) -> Self:
        self._recorder.begin(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._recorder.end()
        # A capture computes nothing.
        for raw, before in self._before.values():
            raw.copy_(before)
        self._before.clear()

    def keep(self, raw: Tensor) -> None:
        """Remember what is in memory that an operator is about to change."""
        base = torch.empty(0, dtype=torch.uint8).set_(raw.untyped_storage())
        self._before.setdefault(base.data_ptr(), (base, base.clone()))

    def replay(self) -> None:
        """Run the operators again."""
        timeline = self._recorder.timeline
        timeline.current.queue()
        for reference, operator in self.foreign.values():
            if reference() is None:
                timeline.fault(
                    "freed under a graph",
                    f"a replay of {operator} uses memory that has been freed since the capture",
                )
        for reference, operator, writes in self.uses:
            memory = reference()
            if memory is not None:
                memory.use(operator, writes=writes)
        for run in self.operators:
            run()


class Recorder:
    """Note the operators of the device while a graph is captured.

    Args:
        timeline: Timeline of the device.
    """

    def __init__(self, timeline: Timeline) -> None:
        self.timeline = timeline
        self.graph: Graph | None = None

    def begin(self, graph: Graph) -> None:
        self.timeline.is_capturing = True
        self.graph = graph

    def end(self) -> None:
        self.timeline.is_capturing = False
        self.graph = None

    def allocated(self, memory: Memory) -> None:
        """Note memory that is allocated now."""
        if self.graph is not None:
            self.graph.own.append(memory)

    def before(self, name: str, used: list[Any], written: list[Any]) -> None:
        """Note the memory that an operator is about to use."""
        if self.graph is None:
            return
        own = set(map(id, self.graph.own))
        for each in used:
            if id(each.memory) in own:
                continue
            reference = weakref.ref(each.memory)
            writes = any(each is other for other in written)
            self.graph.foreign.setdefault(id(each.memory), (reference, name))
            self.graph.uses.append((reference, name, writes))
            if writes:
                self.graph.keep(each.raw)

    def record(self, run: Callable[[], Any], result: Any) -> None:
        """Note an operator and its result."""
        if self.graph is None:
            return
        outputs = [x for x in tree_leaves(result) if isinstance(x, Tensor)]

        def again() -> None:
            anew = [x for x in tree_leaves(run()) if isinstance(x, Tensor)]
            for output, value in zip(outputs, anew, strict=True):
                if value is not output:
                    output.copy_(value)

        self.graph.operators.append(again)
