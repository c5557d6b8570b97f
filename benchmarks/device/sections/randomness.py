"""Random states of the device, pinned batches, and copies that the host does not wait for."""

import copy
import json
import os
import re
import tempfile
import time
from typing import Any

import torch
from torch import Tensor
from transformers import Trainer, TrainingArguments

from device import networks, ways
from device.measuring import work_of
from device.networks import regression_data, regressor
from device.recording import Recording
from device.setup import Setup
from mfwrap.checkpoints.random_states import random_states, restore_random_states
from mfwrap.trainer import MFTrainer
from monitors import WARM_UP, Timer

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for deterministic algorithms


def measure(recording: Recording, setup: Setup) -> None:
    """Restore random states, continue a training with dropout, and look at copies of batches."""
    with recording.part("random states"):
        _states(recording, setup)
    with recording.part("dropout after a restore"):
        torch.use_deterministic_algorithms(mode=True)
        try:
            _continued(recording, setup)
        finally:
            torch.use_deterministic_algorithms(mode=False)
    with recording.part("copies of batches"):
        _copies(recording, setup)


def _draws(setup: Setup) -> list[Tensor]:
    kept = torch.nn.functional.dropout(torch.ones(1000, device=setup.device), 0.5)
    drawn = (torch.rand(5), torch.randn(5, device=setup.device), kept)
    return [each.cpu() for each in drawn]


def _states(recording: Recording, setup: Setup) -> None:
    _draws(setup)
    start = time.perf_counter()
    saved = json.loads(json.dumps(random_states()))
    elapsed = time.perf_counter() - start
    expected = _draws(setup)
    restore_random_states(saved)
    same = all(torch.equal(a, b) for a, b in zip(expected, _draws(setup), strict=True))
    recording.check("restored states draw the same numbers", holds=same, found=str(same))
    recording.row(
        "random states",
        {"saved in, ms": elapsed * 1e3, "with the states of GPUs": len(saved.get("cuda", []))},
    )


def _continued(recording: Recording, setup: Setup) -> None:
    """Train on, go back to a copy of all states, and train the same updates again."""
    network = regressor(setup, dropout=0.1)
    cell = ways.full_cell(network)
    optimizer, schedule = cell.optimizer, cell.lr_scheduler
    batches = regression_data(setup, 6)
    cell(**batches[0])
    cell.flush()  # the schedule follows the update only now
    parts: list[Any] = [network, optimizer, cell, *([schedule] if schedule else [])]
    saved = [copy.deepcopy(part.state_dict()) for part in parts]
    states = random_states()
    found = []
    for _ in range(2):
        losses = [cell(**batch).loss for batch in batches[1:]]
        found.append([*losses, *(weight.detach().clone() for weight in network.parameters())])
        for part, state in zip(parts, saved, strict=True):
            part.load_state_dict(copy.deepcopy(state))
        restore_random_states(states)
    differing = sum(not torch.equal(a, b) for a, b in zip(*found, strict=True))
    recording.check(
        "a training with dropout continues bitwise from restored states",
        holds=differing == 0,
        found=f"{differing} of {len(found[0])} losses and weights differ",
    )


def _copies(recording: Recording, setup: Setup) -> None:
    """Count copies from pinned and from pageable memory, and time what pinning gains."""
    cases: list[tuple[type[Trainer], bool, bool]] = [
        (Trainer, True, False),
        (MFTrainer, True, False),
        (MFTrainer, True, True),
        (MFTrainer, False, False),
    ]
    for kind, pins, does_not_block in cases:
        ways.forget_accelerators()
        steps, few = setup.size((20, 5), (WARM_UP + 3, 2))
        timer = Timer(setup.kind)
        with tempfile.TemporaryDirectory() as folder:
            profiled, timed = (
                _trainer(setup, kind, folder, number, pins=pins, blocks=not does_not_block)
                for number in (few, steps)
            )
            work = work_of(setup, profiled.train, operators=False)
            timed.add_callback(timer)
            timed.train()
        copies = {
            name: sum(count for kernel, count in (work.kernels or {}).items() if name in kernel)
            for name in ("HtoD (Pinned", "HtoD (Pageable", "DtoH (Device -> Pinned", "DtoH")
        }
        recording.row(
            f"copies in {few} steps and their start",
            {
                "trainer": kind.__name__,
                "pinned batches": "yes" if pins else "no",
                "non_blocking": "yes" if does_not_block else "no",
                "ms a step": timer.seconds_per_step(steps) * 1e3,
                **{
                    re.sub(r"[()]", "", name): count if setup.on_cuda else None
                    for name, count in copies.items()
                },
            },
        )


def _trainer(
    setup: Setup, kind: type[Trainer], folder: str, steps: int, *, pins: bool, blocks: bool
) -> Trainer:
    width, layers, length = setup.size((512, 6, 512), (32, 1, 16))
    rows = networks.tokens(Setup("cpu", small=True), 8 * steps, length, 512)["input_ids"]
    arguments = TrainingArguments(
        folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        bf16=True,
        use_cpu=not setup.on_cuda,
        dataloader_pin_memory=pins and setup.on_cuda,
        accelerator_config={"non_blocking": not blocks},
        logging_steps=10**6,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        log_level="error",
    )
    network = networks.llama(setup, width, layers, vocabulary=512, length=length)
    data: Any = [{"input_ids": row, "labels": row} for row in rows]
    return kind(network, arguments, train_dataset=data)
