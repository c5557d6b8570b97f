"""Graphs of a device, which hold recorded kernels: CUDA graphs, for example."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch

from mfwrap.compatibility.foreign import ForeignName

_IS_CAPTURING: ContextVar[bool] = ContextVar("is_capturing", default=False)

_IDLE: "weakref.WeakSet[Callable[..., None]]" = weakref.WeakSet()

NAMES = (ForeignName("torch.accelerator", "Graph", since="2.12"),)


def lacks_graphs(device: torch.device) -> bool:
    """Return whether this version of torch cannot capture a graph on a device."""
    return device.type not in {"cpu", "cuda"} and not hasattr(torch.accelerator, "Graph")


def new_graph(device: torch.device) -> Any:
    """Return an empty graph with a method ``replay``; see `capturing`."""
    if device.type == "cuda":
        return torch.cuda.CUDAGraph()
    return torch.accelerator.Graph(capture_error_mode="thread_local")


@contextlib.contextmanager
def capturing(graph: Any, device: torch.device) -> Iterator[None]:
    """Within the block, record what is queued on the current stream instead of running it.

    Args:
        graph: Graph from `new_graph`.
        device: Device of the graph.
    """
    before = _IS_CAPTURING.set(True)
    try:
        if device.type == "cuda":
            stream = torch.cuda.current_stream(device)
            # Other threads, such as those of a data loader, may use the device during the capture.
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                yield
        else:
            with graph:
                yield
    finally:
        _IS_CAPTURING.reset(before)


def is_capturing() -> bool:
    """Return whether this thread is within the block of `capturing`."""
    return _IS_CAPTURING.get()


def idle_in_graphs(function: Callable[..., None]) -> Callable[..., None]:
    """Return a function that does nothing while a graph records, and so may be a hook in one."""

    @functools.wraps(function)
    def unless_capturing(*arguments: Any) -> None:
        if not is_capturing():
            function(*arguments)

    _IDLE.add(unless_capturing)
    return unless_capturing


def is_idle(function: object) -> bool:
    """Return whether a function is one that `idle_in_graphs` has returned."""
    return function in _IDLE
