"""Mistakes in loops with `attach` and with the cell, each as a function of the mistake's name."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn import functional
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader

from mfwrap import DynamicLossScaleUpdateCell, MFTrainOneStepCell
from mfwrap.accelerate import attach
from support.paths import TESTS
from support.small_networks import Classifier, LinearProbe, labelled_batches


class _Loop:
    """An accelerate loop of two batches, whose body the mistakes change.

    Args:
        model: Model to train.
        scale_sense: Loss scale of the step.
        settings: Settings of the accelerator.
    """

    def __init__(
        self, model: nn.Module | None = None, scale_sense: Any = None, **settings: Any
    ) -> None:
        self.accelerator = Accelerator(cpu=True, **settings)
        self.step = attach(self.accelerator, scale_sense=scale_sense)
        network = Classifier() if model is None else model
        optimizer = AdamW(network.parameters(), lr=0.01)
        self.model, self.optimizer, self.scheduler, self.batches = self.accelerator.prepare(
            network,
            optimizer,
            StepLR(optimizer, 1),
            DataLoader(labelled_batches(4), batch_size=None),
        )

    def end(self) -> None:
        self.accelerator.end_training()


def half_precision_weights() -> None:
    loop = _Loop(Classifier().half(), DynamicLossScaleUpdateCell(2**16, 2, 10))
    for inputs, labels in loop.batches:
        loop.accelerator.backward(loop.model(inputs.half(), labels))
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.end()


def backward_of_the_loss() -> None:
    loop = _Loop(scale_sense=DynamicLossScaleUpdateCell(2**10, 2, 10))
    for inputs, labels in loop.batches:
        loop.model(inputs, labels).backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.end()


def zero_grad_forgotten() -> None:
    loop = _Loop()
    for inputs, labels in loop.batches:
        loop.accelerator.backward(loop.model(inputs, labels))
        loop.optimizer.step()
    loop.end()


def zero_grad_within_accumulation() -> None:
    loop = _Loop(gradient_accumulation_steps=2)
    for inputs, labels in loop.batches:
        with loop.accelerator.accumulate(loop.model):
            loop.optimizer.zero_grad()
            loop.accelerator.backward(loop.model(inputs, labels))
            loop.optimizer.step()
    loop.end()


def schedule_before_optimizer() -> None:
    loop = _Loop()
    for inputs, labels in loop.batches:
        loop.accelerator.backward(loop.model(inputs, labels))
        loop.scheduler.step()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    loop.end()


def state_loaded_before_prepare() -> None:
    first = _Loop()
    first.accelerator.save_state("saved")
    first.end()
    accelerator = Accelerator(cpu=True)
    attach(accelerator)
    accelerator.load_state("saved")
    model = Classifier()
    accelerator.prepare(model, AdamW(model.parameters()))


def unused_parameters() -> None:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    ended = subprocess.run(
        [sys.executable, *launcher, "-m", "support.mistakes.unused"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{TESTS}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"},
    )
    # The first sentence of torch's error, and the last line, which is a note.
    said = re.search(r"\[rank0\]: RuntimeError: (.*?\.) (?s:.*)\[rank0\]: (.*)", ended.stderr)
    raise RuntimeError(" ".join(said.groups()) if said else ended.stderr)


def _cell(network: nn.Module, optimizer: Any = None, **settings: Any) -> MFTrainOneStepCell:
    return MFTrainOneStepCell(network, optimizer or SGD(network.parameters(), lr=0.1), **settings)


class _Function(nn.Module):
    """A network of one layer whose loss a function computes from its outputs and the targets."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self._loss = loss

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        return self._loss(self.layer(inputs), targets)


def loss_not_a_scalar() -> None:
    cell = _cell(
        _Function(
            lambda outputs, targets: functional.cross_entropy(outputs, targets, reduction="none")
        )
    )
    for inputs, labels in labelled_batches(2):
        cell(inputs, labels)


def no_grad_around_the_step() -> None:
    cell = _cell(Classifier())
    with torch.no_grad():
        for inputs, labels in labelled_batches(2):
            cell(inputs, labels)


def loss_summed_over_steps() -> None:
    total = torch.zeros(())

    def summed(outputs: Tensor, targets: Tensor) -> Tensor:
        nonlocal total
        total = total + functional.cross_entropy(outputs, targets)
        return total

    cell = _cell(_Function(summed))
    for inputs, labels in labelled_batches(2):
        cell(inputs, labels)


def changed_in_place() -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        activations = outputs.exp()
        activations += 1
        return functional.cross_entropy(activations, targets)

    cell = _cell(_Function(loss))
    for inputs, labels in labelled_batches(2):
        cell(inputs, labels)


def batch_on_another_device() -> None:
    cell = _cell(Classifier())
    for inputs, labels in labelled_batches(2):
        cell(inputs.to("meta"), labels.to("meta"))


def targets_of_double_precision() -> None:
    cell = _cell(_Function(functional.mse_loss))
    for inputs, _ in labelled_batches(2):
        cell(inputs, torch.from_numpy(np.ones((8, 4))))


def integer_targets() -> None:
    cell = _cell(_Function(functional.binary_cross_entropy_with_logits))
    for inputs, labels in labelled_batches(2):
        cell(inputs, functional.one_hot(labels, 4))


def nan_in_the_data() -> None:
    cell = _cell(LinearProbe(), max_consecutive_skips=3)
    for _ in range(6):
        cell(torch.tensor([[1.0, float("nan")]]))
    cell.flush()
