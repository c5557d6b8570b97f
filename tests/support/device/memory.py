"""Numbers, warnings and errors of memory on the simulated device."""

import logging
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from mfwrap import ExponentialMovingAverage, MFTrainOneStepCell
from mfwrap.callbacks import MemoryMonitor, MFLossMonitor
from mfwrap.memory import device_memory, memory_note
from mfwrap.records import read_json_lines
from mfwrap.trainer import MFTrainer
from support.device.device import Device
from support.device.ways import _accelerator, llama

__all__ = ["loop", "numbers", "trainer"]


def numbers() -> dict[str, Any]:
    """Read the memory of the device, and what its allocator says."""
    device = Device()
    kept = torch.ones(1000).to(device.device)
    torch.ones(5000).to(device.device)
    with device.watching() as watch:
        read = device_memory(device.device)
    stats = device.allocator.stats()
    del kept
    expected = [
        stats["allocated_bytes"]["all"]["current"],
        stats["allocated_bytes"]["all"]["peak"],
        stats["reserved_bytes"]["all"]["peak"],
        stats["num_alloc_retries"],
        device.allocator.capacity,
    ]
    return {
        "read": list(read or ()),
        "of the allocator": expected,
        "events": [*watch.reads, *watch.synchronizations, *watch.waits, *watch.faults],
        "resets": device.allocator.num_resets,
    }


def _said(name: str) -> list[str]:
    """Return a list that gets what a monitor logs."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]  # (a stand-in)
    logging.getLogger(f"mfwrap.callbacks.{name}").addHandler(handler)
    return lines


class _Mean(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, rows: Tensor) -> Tensor:
        result: Tensor = self.network(rows).square().mean()
        return result


def loop() -> dict[str, Any]:
    """Train with a cell and a monitor of a device that is soon full, with larger and larger rows.

    Returns:
        The records, what the allocator said after each step, what the monitor has logged, and what
        its events have made the host wait for.
    """
    device, state, control = Device(), TrainerState(), TrainerControl()
    device.allocator.capacity, device.allocator.num_retries = 80_000, 7
    said = _said("memory")
    network = nn.Sequential(nn.Linear(4, 64), nn.Linear(64, 1)).to(device.device)
    cell = MFTrainOneStepCell(
        _Mean(network), torch.optim.AdamW(network.parameters(), fused=True), use_clip_grad=True
    )
    events, stats = [], []
    with tempfile.TemporaryDirectory() as folder:
        monitor = MemoryMonitor(4, folder=folder)

        def send(event: str) -> None:
            with device.watching() as watch:
                getattr(monitor, event)(None, state, control, model=network)
            events.extend([*watch.synchronizations, *watch.reads, *watch.waits])

        cell.before_update.append(lambda: send("on_pre_optimizer_step"))
        send("on_train_begin")
        for number in range(1, 13):
            send("on_step_begin")
            cell(torch.randn(8 * number, 4).to(device.device))
            state.global_step = number
            send("on_step_end")
            stats.append(device.allocator.stats())
            if number == 9:
                device.allocator.reset()
        send("on_train_end")
        records = read_json_lines(Path(folder) / "memory.jsonl")
    return {
        "records": records,
        "stats": stats,
        "capacity": device.allocator.capacity,
        "said": said,
        "events": events,
        "resets": device.allocator.num_resets,
    }


def trainer() -> dict[str, Any]:
    """Train with `MFTrainer` until a micro-batch fills the device.

    Returns:
        The text and the note of the error, the snapshot, and what `MFLossMonitor` has logged.
    """
    device = Device()
    _accelerator(device.device)
    said = _said("loss_monitor")
    tokens = torch.randint(0, 64, (64, 8), generator=torch.Generator().manual_seed(1))
    network = llama(torch.device("cpu"))
    calls = []

    def fill(*_: Any) -> None:
        calls.append(None)
        if len(calls) == 6:
            device.allocator.fill()

    network.lm_head.register_forward_pre_hook(fill)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=8,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            optim="adamw_torch_fused",
            logging_steps=1000,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        trained = MFTrainer(
            network,
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
            callbacks=[MFLossMonitor(), MemoryMonitor(memory_snapshot=True)],
            ema=lambda network: ExponentialMovingAverage(network, 0.9),
        )
        try:
            trained.train()
        except torch.OutOfMemoryError as error:
            note, text = memory_note(error), str(error)
        return {
            "note": note,
            "text": text,
            "snapshot": (Path(folder) / "memory_snapshot.pickle").read_text(encoding="utf-8"),
            "history": device.allocator.history,
            "said": said,
        }
