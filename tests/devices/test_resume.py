"""A resumed training equals one that was never stopped, bit by bit, on a CPU and on a GPU."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch.optim.lr_scheduler import LambdaLR

from mfwrap import (
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
    StepConfig,
)
from mfwrap.accelerate import attach
from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.checkpoints.random_states import random_states, restore_random_states
from support.device_runs import LossNetwork, Rows, everything, small_trainer, stacked
from support.devices import each_device
from support.resumed_training import StopAfter, end_of, spoil_random_states
from support.training_state import assert_same_state, training_state

PRECISIONS = {"float32": {}, "bf16": {"bf16": True}, "fp16": {"fp16": True}}


@pytest.fixture(autouse=True)
def _deterministic():
    """Let torch refuse operations whose results differ from run to run."""
    torch.use_deterministic_algorithms(True)  # noqa: FBT003  (torch's signature)
    yield
    torch.use_deterministic_algorithms(False)  # noqa: FBT003  (torch's signature)


def generator_of(device):
    """Return the state of the generator that draws the masks of dropout."""
    return torch.get_rng_state() if device == "cpu" else torch.cuda.get_rng_state()


@each_device
@pytest.mark.parametrize("precision", PRECISIONS)
def test_mftrainer(precision, device, tmp_path):
    """`MFTrainer` with dropout, average, scale, a monitor, and a skipped update in each half."""
    data = Rows(bad=[5, 17, 40])
    settings = {"max_steps": 12, "max_grad_norm": 0.5, "save_strategy": "steps", "save_steps": 100}
    settings |= {"logging_strategy": "steps", "logging_steps": 1, "lr_scheduler_type": "cosine"}
    settings |= {"data": data, **PRECISIONS[precision]}

    def trainer(folder, *callbacks):
        return small_trainer(
            tmp_path / folder,
            device,
            callbacks=[*callbacks, TrainingStateMonitor()],
            extras=everything(),
            **settings,
        )

    straight = trainer("straight")
    straight.train()
    expected, generator = end_of(straight), generator_of(device)
    trainer("stopped", StopAfter(6)).train()
    resumed = trainer("resumed")
    with torch.no_grad():
        for parameter in resumed.model.parameters():
            parameter.fill_(7.0)
    spoil_random_states()
    torch.rand(777, device=device)
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-6"))

    assert_same_state(expected, end_of(resumed))
    assert torch.equal(generator_of(device), generator)
    assert resumed.attached.last_report.skipped_updates.item() >= 2


def batches(device, number):
    """Return batches of four rows; the third and the eighth have a NaN loss."""
    rows = Rows(4 * number, bad=[9, 30])
    return [
        {name: tensor.to(device) for name, tensor in stacked(four).items()}
        for four in (
            [rows[i] for i in range(first, first + 4)] for first in range(0, 4 * number, 4)
        )
    ]


class OwnLoop:
    """A loop over a cell, which saves and loads its own states.

    Args:
        device: Training device.
        seed: Seed of the weights.
        capture: Whether to capture the steps.
    """

    def __init__(self, device, seed, *, capture):
        torch.manual_seed(seed)
        self.network = LossNetwork().to(device)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), 1e-2, fused=True)
        self.schedule = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.cell = MFTrainOneStepCell(
            self.network,
            self.optimizer,
            use_clip_grad=True,
            scale_sense=DynamicLossScaleUpdateCell(2.0**10, 2, 3),
            lr_scheduler=self.schedule,
            ema=ExponentialMovingAverage(self.network, 0.9, warmup=True),
            capture=capture,
        )

    def step(self, batch):
        self.cell(**batch)

    def parts(self):
        self.cell.flush()
        return (self.network, self.optimizer, self.schedule, self.cell)

    def save(self, file):
        torch.save([*(part.state_dict() for part in self.parts()), random_states()], file)

    def load(self, file):
        *states, generators = torch.load(file, weights_only=True)
        for part, state in zip(self.parts(), states, strict=True):
            part.load_state_dict(state)
        restore_random_states(generators)


class AttachedLoop:
    """An attached loop, which accelerate saves and loads.

    Args:
        device: Training device.
        seed: Seed of the weights.
    """

    def __init__(self, device, seed):
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        self.accelerator = Accelerator(cpu=device == "cpu")
        self.attached = attach(
            self.accelerator,
            StepConfig(use_clip_grad=True, local_norm=True),
            lambda network: ExponentialMovingAverage(network, 0.9, warmup=True),
            scale_sense=DynamicLossScaleUpdateCell(2.0**10, 2, 3),
        )
        torch.manual_seed(seed)
        network = LossNetwork()
        optimizer = torch.optim.AdamW(network.parameters(), 1e-2, fused=True)
        schedule = LambdaLR(optimizer, lambda step: 1 / (1 + step))
        prepared = self.accelerator.prepare(network, optimizer, schedule)
        self.network, self.optimizer, self.schedule = prepared
        assert next(self.network.parameters()).device.type == device

    def step(self, batch):
        self.accelerator.backward(self.network(**batch)["loss"])
        self.accelerator.clip_grad_norm_(self.network.parameters(), 1.0)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()

    def parts(self):
        self.attached.flush()
        return (self.network, self.optimizer, self.schedule, self.attached.attachment.step)

    def save(self, folder):
        self.accelerator.save_state(str(folder))

    def load(self, folder):
        self.accelerator.load_state(str(folder))


LOOPS = {
    "cell": lambda device, seed: OwnLoop(device, seed, capture=False),
    "captured cell": lambda device, seed: OwnLoop(device, seed, capture=True),
    "attach": AttachedLoop,
}


@each_device
@pytest.mark.parametrize("loop", LOOPS.values(), ids=LOOPS)
def test_a_loop(loop, device, tmp_path):
    """A loop with dropout, average, dynamic scale and skipped updates."""
    data = batches(device, 12)
    straight = loop(device, 0)
    for number, batch in enumerate(data):
        if number == 6:
            straight.save(tmp_path / "checkpoint")
        straight.step(batch)
    expected, generator = training_state(*straight.parts()), generator_of(device)

    resumed = loop(device, 1)
    spoil_random_states()
    torch.rand(777, device=device)
    resumed.load(tmp_path / "checkpoint")
    for batch in data[6:]:
        resumed.step(batch)

    assert_same_state(expected, training_state(*resumed.parts()))
    assert torch.equal(generator_of(device), generator)
