"""Trainings and commands that a `ForkServer` runs beside others, in one current folder.

Each training takes the name of its run folder, continues what it has left there, and writes its
state at the end to ``end_<run>.pt``, except the recipe.
"""

import itertools
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.optim import AdamW

from mfwrap import Model, StepConfig
from mfwrap.accelerate import attach
from mfwrap.callbacks import (
    CheckpointConfig,
    CheckpointMonitor,
    LocalNormMonitor,
    LoopMonitor,
    ModelCheckpoint,
    TrainingStateMonitor,
)
from mfwrap.callbacks.metrics_recorder import MetricsRecorder
from support.crash.loops import command_line
from support.resumed_training import RunSettings, end_of, new_trainer
from support.small_networks import Classifier, labelled_batches
from support.training_state import training_state

__all__ = ["attached", "model", "reads", "recipe", "trainer"]

NUM_UPDATES, SAVE_STEPS = 12, 2


def recipe(run: str, *words: str) -> None:
    """Run ``mfwrap train crash.yaml`` into a run folder."""
    command_line("train", "crash.yaml", "--set", f"training.output_dir={run}", *words)


def trainer(run: str, checkpoint: str = "auto", keep: int = 1) -> None:
    """Train with `MFTrainer` and monitors."""
    trained = new_trainer(
        Path(run),
        RunSettings(logging_steps=5),
        callbacks=[
            MetricsRecorder(Path(run)),
            LocalNormMonitor(folder=run),
            TrainingStateMonitor(local_norm_format="jsonl", folder=run),
            CheckpointMonitor(save_checkpoint_steps=SAVE_STEPS, keep_checkpoint_max=keep),
        ],
        save_strategy="no",
    )
    trained.train(resume_from_checkpoint=checkpoint)
    found = end_of(trained)
    _write_end(run, {name: value for name, value in found.items() if "generator" not in name})


def attached(run: str, checkpoint: str, origin: str = "") -> None:
    """Train with an accelerate loop, `attach` and `LoopMonitor`, which saves to one folder.

    Args:
        run: Run folder.
        checkpoint: Folder of the checkpoint.
        origin: Folder to begin from if `checkpoint` is missing; empty to begin from the start.
    """
    accelerator = Accelerator(cpu=True)
    step = attach(accelerator, StepConfig(local_norm=True, use_clip_grad=True))
    set_seed(0)
    network = Classifier()
    network, optimizer = accelerator.prepare(network, AdamW(network.parameters(), lr=0.1))
    monitor = LoopMonitor(step, run, max_steps=NUM_UPDATES)
    for folder in (checkpoint, origin):
        if folder and Path(folder).is_dir():
            accelerator.load_state(folder)
            break
    for number in range(monitor.global_step + 1, NUM_UPDATES + 1):
        [(inputs, labels)] = labelled_batches(1, size=4, seed=number)
        accelerator.backward(network(inputs + 0.01 * torch.randn_like(inputs), labels))
        optimizer.step()
        optimizer.zero_grad()
        monitor.end_step()
        if number % SAVE_STEPS == 0:
            accelerator.save_state(checkpoint)
    monitor.close()
    _write_end(run, training_state(network, optimizer.optimizer, step.attachment.step))


def model(run: str, checkpoints: str) -> None:
    """Train with `Model`, a monitor, and a `ModelCheckpoint` in a folder of its own or shared."""
    Accelerator(cpu=True)
    set_seed(0)
    network = Classifier()
    loss = _FirstOfPair(network)
    trained = Model(loss, optimizer=AdamW(network.parameters(), lr=0.1, fused=True))
    config = CheckpointConfig(save_checkpoint_steps=SAVE_STEPS, keep_checkpoint_max=2)
    saver = ModelCheckpoint(directory=checkpoints, config=config)
    trained.train(1, labelled_batches(NUM_UPDATES, size=4, seed=0), [MetricsRecorder(run), saver])
    name = Path(saver.latest_ckpt_file_name).name.partition("-")[0]
    _write_end(run, {"prefix": name, **network.state_dict()})


class _FirstOfPair(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return self.network(inputs, labels)


def reads(seed: int, until: str, commands: Sequence[Sequence[str]]) -> None:
    """Run commands in a random order until a file is there; print the status of each."""
    draw = random.Random(seed)  # noqa: S311  (test data, not cryptography)
    for number in itertools.count():
        if Path(until).exists() and number >= len(commands):
            return
        words = draw.choice(commands)
        try:
            command_line(*words)
        except SystemExit as end:
            print(f"status {end.code} of {words[0]}")  # noqa: T201  (the test reads it)
        sys.stdout.flush()


def _write_end(run: str, state: dict[str, Any]) -> None:
    torch.save(state, f"end_{run}.pt")
