"""The simulated device: its registration in torch, and what it has seen."""

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

from support.device.clocks import Event, Stream, Timeline, Watch
from support.device.graphs import Graph
from support.device.pinned import PinnedTensor, arrive, pinned
from support.device.tensors import Runtime

NAME = "simulated"


class Device:
    """Register the device in this process, for good. Make one only, before other tensors."""

    def __init__(self) -> None:
        _setup_privateuseone_for_python_backend(NAME)
        getattr(torch, NAME).get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
        self.device = torch.device(NAME, 0)
        self._timeline = Timeline()
        self.allocator = self._timeline.allocator
        """Numbers of the device's memory."""
        self.allocator.join(getattr(torch, NAME))
        self._timeline.on_wait = arrive
        self._runtime = Runtime(self.device, self._timeline)
        self._library = torch.library.Library("_", "IMPL")
        self._library.fallback(self._make, "PrivateUse1")
        self._replace_torchs()

    def _make(self, operator: Any, *args: Any, **keywords: Any) -> Any:
        """Run an operator that makes a tensor on the device from nothing."""
        keywords = {**keywords, "device": torch.device("cpu"), "pin_memory": False}
        raw = operator(*args, **keywords)
        if raw.is_floating_point():
            raw.fill_(float("nan"))
        return self._runtime.new(raw)

    def _replace_torchs(self) -> None:
        """Put stand-ins in the place of torch's streams, events and pinned memory."""
        timeline = self._timeline

        class BoundEvent(Event):
            def __init__(self, device: object = None, **settings: Any) -> None:
                super().__init__(device, timeline, **settings)

        substitutes: Any = torch
        substitutes.Event = BoundEvent
        substitutes.Stream = lambda *_: timeline.new_stream()
        torch.accelerator.Graph = functools.partial(Graph, self._runtime.recorder)  # type: ignore[assignment, misc]  # (a stand-in)
        torch.accelerator.current_stream = lambda *_: timeline.current  # type: ignore[assignment]  # (a stand-in)
        torch.accelerator.synchronize = lambda *_: timeline.synchronize("synchronize")  # type: ignore[assignment]  # (a stand-in)
        tensor = torch.tensor

        @functools.wraps(tensor)
        def copied(
            data: Any, *, device: Any = None, pin_memory: bool = False, **keywords: Any
        ) -> Tensor:
            # Inside `torch.tensor`, torch hides the operators from tensors in Python.
            made = tensor(data, **keywords)
            made = pinned(made, timeline) if pin_memory else made
            return made if device is None else made.to(device)

        substitutes.tensor = copied
        for name in ("zeros", "empty", "full"):
            setattr(torch, name, _pinnable(getattr(torch, name), timeline))
        substitutes.Tensor.pin_memory = lambda tensor, *_: (
            tensor if isinstance(tensor, PinnedTensor) else pinned(tensor, timeline)
        )

    @contextmanager
    def watching(self) -> Iterator[Watch]:
        """Yield what happens on the device within the block."""
        before, self._timeline.watch = self._timeline.watch, Watch()
        try:
            yield self._timeline.watch
        finally:
            self._timeline.watch = before

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """Refuse, as a fault, what a CUDA graph cannot hold."""
        self._timeline.is_capturing = True
        try:
            yield
        finally:
            self._timeline.is_capturing = False

    @contextmanager
    def spoiling(self, spoil: Callable[[str, Any], None]) -> Iterator[None]:
        """Call a function with the name and the result, on the CPU, of each operator."""
        before, self._runtime.spoil = self._runtime.spoil, spoil
        try:
            yield
        finally:
            self._runtime.spoil = before

    def new_stream(self) -> Stream:
        return self._timeline.new_stream()

    def on(self, stream: Stream) -> AbstractContextManager[None]:
        """Queue the work of the block on a stream."""
        return self._timeline.on(stream)

    @property
    def stream(self) -> Stream:
        """The current stream."""
        return self._timeline.current


def _pinnable(make: Callable[..., Tensor], timeline: Timeline) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def made(*args: Any, pin_memory: bool = False, **keywords: Any) -> Tensor:
        tensor = make(*args, **keywords)
        return pinned(tensor, timeline) if pin_memory else tensor

    return made
