"""Checkpoints in the background: their cost, and that they are those written at once."""

import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from transformers import TrainingArguments

import background
from background import AT_ONCE, BACKGROUND
from device.measuring import spread
from device.recording import Recording
from device.setup import Setup
from device.ways import forget_accelerators
from mfwrap.checkpoints.manifest import MANIFEST, write_manifest
from mfwrap.trainer import MFTrainer

LARGEST_TOTAL, LARGEST_STALL = 0.3, 0.15
"""Largest shares of the cost of a save at once."""


def measure(recording: Recording, setup: Setup) -> None:
    """Compare the checkpoints, and measure their cost."""
    warnings.filterwarnings("ignore")
    with tempfile.TemporaryDirectory() as name:
        with recording.part("the same checkpoints"):
            _same(recording, setup, Path(name))
        for gigabytes in setup.size((0.5, 2.0), (0.001,)):
            setup.release()
            with recording.part(f"{gigabytes:g} GB"):
                _cost(recording, setup, gigabytes, Path(name))


def _same(recording: Recording, setup: Setup, folder: Path) -> None:
    """Train twice, and compare the tensors of a checkpoint whose training goes on at once."""
    found: list[Any] = []
    for way in (AT_ONCE, BACKGROUND):
        forget_accelerators()
        torch.manual_seed(0)
        width = setup.size(1024, 16)
        run = folder / way
        trainer = MFTrainer(
            background.Layers(12 * width**2 * 8, width),
            TrainingArguments(
                str(run),
                max_steps=8,
                save_steps=2,
                per_device_train_batch_size=4,
                report_to="none",
                disable_tqdm=True,
                use_cpu=not setup.on_cuda,
            ),
            train_dataset=[{"inputs": torch.full((width,), 0.1 * row)} for row in range(32)],
            async_save=way == BACKGROUND,
        )
        trainer.train()
        checkpoint = run / "checkpoint-2"
        optimizer = torch.load(checkpoint / "optimizer.pt", map_location="cpu", weights_only=True)
        own = (checkpoint / MANIFEST).read_bytes()
        weights = json.loads(own)["files"]["model.safetensors"]
        write_manifest(checkpoint)
        found.append((weights, optimizer["state"], own == (checkpoint / MANIFEST).read_bytes()))
    (weights, state, _), (own_weights, own_state, is_read) = found
    holds = weights == own_weights and all(
        torch.equal(each, own_state[number][name])
        for number, entries in state.items()
        for name, each in entries.items()
    )
    recording.check(
        "weights and optimizer of a checkpoint in the background are those of one at once",
        holds=holds,
        found="equal" if holds else "different",
    )
    recording.check("the checksums are those of the files", holds=is_read, found=str(is_read))


def _cost(recording: Recording, setup: Setup, gigabytes: float, folder: Path) -> None:
    forget_accelerators()
    width = setup.size(background.WIDTH, 32)
    found = background.costs(
        background.Sizes(
            num_bytes=int(gigabytes * 1e9),
            num_saves=3,
            folder=folder,
            device=setup.kind,
            width=width,
            # The steps of a turn must take longer than it takes to write a checkpoint.
            repeats=setup.size(1024 if setup.on_cuda else 4, 1),
        )
    )
    for way, measured in found.items():
        totals, stalls = zip(*measured, strict=True)
        recording.row(
            f"Seconds of a save of {gigabytes:g} GB",
            {"saves": way, "total": spread(totals), "stall alone": spread(stalls)},
        )
    total, stall = background.shares(found)
    recording.summarize_more(
        f"saves of {gigabytes:g} GB in the background cost {total:.2f} of those at once, the stall "
        f"alone {stall:.2f}"
    )
    if not setup.small:
        for what, share, largest in (
            ("cost", total, LARGEST_TOTAL),
            ("stall", stall, LARGEST_STALL),
        ):
            recording.check(
                f"the {what} of a save of {gigabytes:g} GB is at most {largest} of one at once",
                holds=share <= largest,
                found=f"{share:.2f}",
            )
