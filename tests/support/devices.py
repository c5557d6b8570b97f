"""Run tests on a CPU and on a GPU, and see there what the host waits for.

A test that takes the argument `device` runs its body on a CPU in ``make test``, and on a GPU in
``make test-cuda``.
"""

import contextlib
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from support.host_reads import HostReads

__all__ = ["each_device", "occupied", "refused_waits", "seen_waits", "skip_if_refused"]

each_device = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
)

_CYCLES = 400_000_000
"""Length of the work that occupies a GPU: 0.2 seconds of an H100. The host needs a tenth of it for
the steps of these tests."""


def occupied() -> torch.cuda.Event:
    """Give the GPU work for a while, after everything that is queued is done.

    Returns:
        An event that is reached when this work is done. While its ``query`` returns False, the host
        is ahead of the device. torch's debug mode does not see waits for events; this shows them.
    """
    torch.cuda.synchronize()
    torch.cuda._sleep(_CYCLES)
    event = torch.cuda.Event()
    event.record()
    return event


@contextlib.contextmanager
def refused_waits(device: str) -> Iterator[None]:
    """Within the block, a read of a tensor on the host, or a copy that waits, is an error.

    On a CPU such reads are collected, and fail the test at the end of the block.
    """
    if device == "cpu":
        with HostReads() as counted:
            yield
        assert counted.reads == []
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextlib.contextmanager
def seen_waits(device: str) -> Iterator[list[str]]:
    """Within the block, collect what the host waits for.

    After the block, the list that the block gets has an entry for each wait: on a GPU, the line
    that waited, on a CPU, the kind of the read.
    """
    seen: list[str] = []
    if device == "cpu":
        with HostReads() as counted:
            yield seen
        # `to` copies nothing between devices here.
        seen += [read.name for read in counted.reads if read.name != "to"]
        return

    def note(message: Any, *_: Any, **__: Any) -> None:
        if "synchronizing CUDA operation" in str(message):
            seen.append(_waiting_line(traceback.extract_stack(sys._getframe(1))))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield seen
        finally:
            torch.cuda.set_sync_debug_mode("default")


def _waiting_line(stack: Sequence[traceback.FrameSummary]) -> str:
    """Return the innermost line that made a call, not one that passes on the calls of others."""
    frame = next(
        frame
        for frame in reversed(stack)
        if "warnings" not in Path(frame.filename).stem and frame.name != "__torch_function__"
    )
    return f"{frame.filename}:{frame.lineno}"


def skip_if_refused(make_optimizer: Callable[[Any], Optimizer], device: str) -> None:
    """Skip the test if torch's fused kernel refuses a device: Adagrad's refuses CUDA in torch 2.11.

    Args:
        make_optimizer: Makes the optimizer from its parameters.
        device: Device of the parameters.
    """
    weights = [nn.Parameter(torch.zeros(shape, device=device)) for shape in ((1,), (1, 1))]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    try:
        make_optimizer(weights).step()
    except RuntimeError as error:
        if "`fused=True` requires" not in str(error):
            raise
        pytest.skip(f"torch {torch.__version__}: {error}")
