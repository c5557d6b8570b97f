"""Training in float16 with real overflows: the scale's course, and what a skipped update changes.

The oracle is torch's GradScaler in a loop of its own, on the same network and data.
"""

import itertools
import os
import statistics
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import TrainingArguments

from device import networks, ways
from device.networks import Regressor, regression_data, regressor
from device.recording import Recording
from device.setup import Setup
from mfwrap import DynamicLossScaleUpdateCell, MFTrainOneStepCell
from mfwrap.trainer import MFTrainer

os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for deterministic algorithms

UPDATES = 300
STARTING_SCALE = 2.0**40
WINDOW = 20
LEARNING_RATE = 1e-3


def measure(recording: Recording, setup: Setup) -> None:
    """Train with the cell beside GradScaler, and then with MFTrainer."""
    with recording.part("the cell and GradScaler"):
        torch.use_deterministic_algorithms(mode=True)
        try:
            _cell_and_scaler(recording, setup)
        finally:
            torch.use_deterministic_algorithms(mode=False)
    with recording.part("MFTrainer"):
        _trainer(recording, setup)


def _optimizer(network: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(network.parameters(), LEARNING_RATE, fused=True)


def _state(network: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [tensor.detach().clone() for tensor in (*network.parameters(), *states)]


def _cell_and_scaler(recording: Recording, setup: Setup) -> None:
    updates = setup.size(UPDATES, 60)
    ours, changed = _with_cell(setup, regressor(setup), updates)
    torchs = _with_scaler(setup, regressor(setup), updates)
    for name, course in (("cell", ours), ("torch, GradScaler", torchs)):
        losses, scales, skipped = zip(*course, strict=True)
        finite = [loss for loss, is_skipped in zip(losses, skipped, strict=True) if not is_skipped]
        recording.row(
            f"{updates} updates in float16, loss scale from {STARTING_SCALE:.0e}",
            {
                "step": name,
                "skipped updates": sum(skipped),
                "skipped after the first success": sum(skipped[skipped.index(False) :]),
                "smallest and largest scale": f"2^{_log2(min(scales))} to 2^{_log2(max(scales))}",
                "scale at the end": scales[-1],
                "mean loss of the first 20 updates": statistics.fmean(finite[:20]),
                "mean loss of the last 20 updates": statistics.fmean(finite[-20:]),
            },
        )
    same = sum(a[1:] == b[1:] for a, b in zip(ours, torchs, strict=True))
    recording.row(
        "the two courses",
        {"updates with the same scale and decision": same, "of": updates},
    )
    num_skipped = sum(is_skipped for _, _, is_skipped in ours)
    recording.check(
        "skipped updates leave weights and optimizer bitwise unchanged",
        holds=not changed and num_skipped > 0,
        found=f"{len(changed)} of {num_skipped} skipped updates changed something",
    )
    growths = sum(after[1] > before[1] for before, after in itertools.pairwise(ours))
    recording.check(
        "the scale falls at overflows, and grows without them",
        holds=growths > 0 and min(scale for _, scale, _ in ours) < STARTING_SCALE,
        found=f"{num_skipped} overflows, {growths} growths",
    )
    applied = [loss for loss, _, is_skipped in ours if not is_skipped]
    recording.check(
        "the loss falls",
        holds=statistics.fmean(applied[-5:]) < statistics.fmean(applied[:5]),
        found=f"{statistics.fmean(applied[:5]):.4f} to {statistics.fmean(applied[-5:]):.4f}",
    )
    recording.summarize(f"{num_skipped} of {updates} updates skipped, {same} as GradScaler")


def _log2(scale: float) -> int:
    return len(bin(int(scale))) - 3


Course = list[tuple[float, float, bool]]
"""Loss, scale after the update, and whether it was skipped, by update."""


def _with_cell(setup: Setup, network: Regressor, updates: int) -> tuple[Course, list[int]]:
    """Return the course, and the numbers of skipped updates that changed something."""
    optimizer = _optimizer(network)
    cell = MFTrainOneStepCell(
        network,
        optimizer,
        use_clip_grad=True,
        scale_sense=DynamicLossScaleUpdateCell(STARTING_SCALE, 2, WINDOW),
    )
    batches = regression_data(setup, 10)
    course: Course = []
    changed: list[int] = []
    for number in range(updates):
        before = _state(network, optimizer)
        output = cell(**batches[number % 10])
        is_skipped = bool(output.overflow)
        after = _state(network, optimizer)
        if is_skipped:
            # The state that the optimizer made in this update is at its initial zeros.
            new = [torch.zeros_like(tensor) for tensor in after[len(before) :]]
            pairs = zip([*before, *new], after, strict=True)
            if not all(torch.equal(old, now) for old, now in pairs):
                changed.append(number)
        course.append((output.loss.item(), output.loss_scale.item(), is_skipped))
    return course, changed


def _with_scaler(setup: Setup, network: Regressor, updates: int) -> Course:
    optimizer = _optimizer(network)
    scaler = torch.amp.GradScaler(setup.kind, init_scale=STARTING_SCALE, growth_interval=WINDOW)
    batches = regression_data(setup, 10)
    course: Course = []
    for number in range(updates):
        optimizer.zero_grad()
        loss = network(**batches[number % 10])
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        before = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        course.append((loss.item(), scaler.get_scale(), scaler.get_scale() < before))
    return course


def _trainer(recording: Recording, setup: Setup) -> None:
    """Train with the Trainer's own option; on a CPU in bfloat16, which is all that it has there."""
    ways.forget_accelerators()
    steps = setup.size(80, 4)
    width, layers = setup.size((256, 4), (32, 1))
    rows = networks.tokens(Setup("cpu", small=True), 8, 64, 512)["input_ids"].repeat(steps, 1)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=steps,
            per_device_train_batch_size=8,
            learning_rate=1e-3,
            fp16=setup.on_cuda,
            bf16=not setup.on_cuda,
            use_cpu=not setup.on_cuda,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            log_level="error",
        )
        trainer = MFTrainer(
            networks.llama(setup, width, layers, vocabulary=512, length=64),
            arguments,
            train_dataset=[{"input_ids": row, "labels": row} for row in rows],
            scale_sense=DynamicLossScaleUpdateCell(STARTING_SCALE, 2, 2000),
        )
        trainer.train()
    records: list[dict[str, Any]] = [r for r in trainer.state.log_history if "loss" in r]
    finite = [each["loss"] for each in records if each["loss"] == each["loss"]]
    report = trainer.attached.last_report
    recording.row(
        "MFTrainer",
        {
            "precision": "fp16" if setup.on_cuda else "bf16",
            "steps": steps,
            "skipped updates": None if report is None else int(report.skipped_updates),
            "scale at the end": None if report is None else report.output.loss_scale.item(),
            "first loss": finite[0],
            "last loss": finite[-1],
            "accelerate's scaler": type(trainer.accelerator.scaler).__name__,
        },
    )
    recording.check(
        "weights are finite, and the loss falls",
        holds=finite[-1] < finite[0] and all(bool(p.isfinite().all()) for p in _weights(trainer)),
        found=f"{finite[0]:.3f} to {finite[-1]:.3f}",
    )


def _weights(trainer: MFTrainer) -> list[Tensor]:
    network: Any = trainer.model
    return list(network.parameters())
