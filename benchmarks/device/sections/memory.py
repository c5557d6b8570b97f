"""Peak memory of a step beyond what it holds between steps; what `MemoryMonitor` says about it."""

import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState

from device import networks
from device.measuring import peak_of
from device.recording import Recording
from device.setup import Setup
from device.ways import BARE, CAPTURED, PLAIN, WAYS, forget_accelerators
from mfwrap import MFTrainOneStepCell
from mfwrap.callbacks import MemoryMonitor
from mfwrap.memory import device_memory, host_memory, memory_note
from mfwrap.records import read_json_lines

IN_HALF = {name for name in WAYS if name in {BARE, PLAIN, CAPTURED} or "cell" in name}
"""Ways that are measured in bfloat16, too: without accelerate, and without torch's GradScaler."""

LENGTH = 64
"""Few tokens, so that the update and not the activations makes the peak."""


def measure(recording: Recording, setup: Setup) -> None:
    """Measure the memory of each way, in float32 and bfloat16."""
    warnings.filterwarnings("ignore")
    for dtype, width, layers in (
        (torch.float32, *setup.size((768, 12), (32, 1))),
        (torch.bfloat16, *setup.size((2048, 18), (32, 1))),
    ):
        for name in WAYS:
            if dtype == torch.bfloat16 and name not in IN_HALF:
                continue
            setup.release()
            with recording.part(f"{name} in {dtype}"):
                _peak(recording, setup, name, dtype, (width, layers))
    setup.release()
    with recording.part("MemoryMonitor"):
        _monitor(recording, setup)


class _Filling(nn.Module):
    """Return a loss; fill the device if that is asked for."""

    fills = False

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(256, 256)

    def forward(self, rows: Tensor) -> Tensor:
        loss: Tensor = self.inner(rows).square().mean()
        if self.fills:
            torch.empty(2**50, dtype=torch.uint8, device=rows.device)
        return loss


@contextmanager
def _without_synchronizing(setup: Setup) -> Iterator[None]:
    """Raise an error at each call within the block that waits for the device."""
    if setup.on_cuda:
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if setup.on_cuda:
            torch.cuda.set_sync_debug_mode("default")


def _monitor(recording: Recording, setup: Setup) -> None:
    """Check the numbers of `MemoryMonitor`, that it waits for nothing, and a real error."""
    network = _Filling().to(setup.device)
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    cell = MFTrainOneStepCell(network, optimizer, gradient_accumulation_steps=2)
    state, control, rows = TrainerState(), TrainerControl(), torch.ones(8, 256).to(setup.device)
    with tempfile.TemporaryDirectory() as folder:
        monitor = MemoryMonitor(1, folder=folder, memory_snapshot=setup.on_cuda)
        monitor.on_train_begin(None, state, control, model=network)
        seconds = []
        for _ in range(setup.size(20, 3)):
            start = time.perf_counter()
            with _without_synchronizing(setup):
                monitor.on_step_begin(None, state, control)
            seconds.append(time.perf_counter() - start)
            cell(rows)
            state.global_step += 1
            with _without_synchronizing(setup):
                monitor.on_step_end(None, state, control)
        *_, record = read_json_lines(Path(folder) / "memory.jsonl")
        _check_numbers(recording, setup, record)
        network.fills = True
        note = None
        try:
            cell(rows)
        except RuntimeError as error:
            note = memory_note(error)
        beginning = f"out of memory in step {state.global_step + 1}, forward and backward, micro"
        recording.check(
            "a real error says where it was raised",
            holds=note is not None and note.startswith(beginning),
            found=str(note),
        )
        snapshot = Path(folder) / "memory_snapshot.pickle"
        if setup.on_cuda:
            size = snapshot.stat().st_size if snapshot.exists() else 0
            recording.check("torch's snapshot is written", holds=size > 0, found=f"{size} bytes")
        monitor.on_train_end()
    times = {"`on_step_begin` of MemoryMonitor": seconds}
    for name, read in (("numbers of the device", _device_of(setup)), ("of the host", host_memory)):
        start = time.perf_counter()
        for _ in range(100):
            read()
        times[name] = [(time.perf_counter() - start) / 100]
    for name, each in times.items():
        median = sorted(each)[len(each) // 2]
        recording.row("host time of reading the memory", {"what": name, "us": 1e6 * median})


def _device_of(setup: Setup) -> Any:
    return lambda: device_memory(setup.device)


def _check_numbers(recording: Recording, setup: Setup, record: dict[str, Any]) -> None:
    if not setup.on_cuda:
        holds = record["max_host_memory"] > 0 and "memory_allocated" not in record
        recording.check("on a CPU, the memory of the process", holds=holds, found=str(record))
        return
    of_torch = {
        "memory_allocated": torch.cuda.memory_allocated(),
        "max_memory_allocated": torch.cuda.max_memory_allocated(),
        "max_memory_reserved": torch.cuda.max_memory_reserved(),
    }
    found = {name: record[name] for name in of_torch}
    recording.check("the numbers are torch's", holds=found == of_torch, found=str(found))
    total = torch.cuda.get_device_properties(setup.device).total_memory
    share = of_torch["max_memory_reserved"] / total
    near = abs(record["max_memory_share"] - share) < 1e-4
    recording.check("so is the share of the device", holds=near, found=f"{share:.5f}")


def _peak(
    recording: Recording, setup: Setup, name: str, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    forget_accelerators()
    way, _ = WAYS[name]
    vocabulary = setup.size(32_000, 64)
    network: Any = networks.llama(setup, *shape, vocabulary=vocabulary, length=LENGTH)
    network.to(dtype)
    number = networks.num_parameters(network)
    step = way(setup, network, networks.masked_tokens(setup, 1, LENGTH, vocabulary))
    for _ in range(5):  # a capture comes after the third step
        step()
    setup.synchronize()
    held = torch.cuda.memory_allocated() if setup.on_cuda else None
    peak = peak_of(setup, step)
    gradients = number * dtype.itemsize
    recording.row(
        f"Llama of {number / 1e6:.0f} million parameters in "
        f"{str(dtype).removeprefix('torch.')}, {LENGTH} tokens a step",
        {
            "whole step": name,
            "held between steps, bytes a parameter": None if held is None else held / number,
            "peak of a step over that, MB": None if peak is None else peak / 1e6,
            "peak over that and the gradients, MB": None
            if peak is None
            else (peak - gradients) / 1e6,
        },
    )
