"""The attached loop never reads on the host if the optimizer can skip on the device."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, LambdaLR, OneCycleLR, StepLR
from transformers import DefaultFlowCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from mfwrap import (
    AdaptiveLossScaleUpdateCell,
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    StepConfig,
)
from mfwrap.accelerate import AttachedStep, attach
from mfwrap.callbacks import MFLossMonitor
from support.device import needs_backends, run
from support.host_reads import HostReads
from support.small_networks import Classifier, labelled_batches

# On a CPU the results of an update are known at once; let them arrive late, as on a device.
pytestmark = pytest.mark.usefixtures("_late_results")

NAN, SPIKE = float("nan"), 1e4
FACTORS = {
    "applied first": (1.0, NAN, 1.0, SPIKE, 1.0, 1.0),
    "overflow first": (NAN, 1.0, 1.0, SPIKE, NAN, 1.0),
    "spike first": (SPIKE, NAN, 1.0, 1.0, 1.0, SPIKE),
}
"""Factors that multiply the losses of successive updates."""

FUSED = {
    "AdamW": lambda parameters: AdamW(parameters, lr=1e-2, fused=True),
    "Adam": lambda parameters: Adam(parameters, lr=1e-2, fused=True),
    "SGD with momentum": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, fused=True),
}
FOREACH = {
    "AdamW": lambda parameters: AdamW(parameters, lr=1e-2, foreach=True),
    "SGD": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, foreach=True),
}
SCHEDULES = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "StepLR": lambda optimizer: StepLR(optimizer, 2),
    "warm restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 2),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=20),
}
LOSS_SCALES = {
    "dynamic": lambda: DynamicLossScaleUpdateCell(2.0**16, 2, 2),
    "adaptive": lambda: AdaptiveLossScaleUpdateCell(2.0**16, 2, 20),
    "fixed": lambda: 2.0**10,
    "none": lambda: None,
}
each_fused = pytest.mark.parametrize("make_optimizer", FUSED.values(), ids=FUSED)
each_order = pytest.mark.parametrize("factors", FACTORS.values(), ids=FACTORS)


class Loop(NamedTuple):
    """An attached loop with every feature of the step, and micro-batches on its device."""

    accelerator: Accelerator
    step: AttachedStep
    network: torch.nn.Module
    optimizer: Optimizer
    schedule: object
    micro_batches: list[tuple[Tensor, Tensor, Tensor]]

    def update(self, number: int) -> None:
        """Run one update of two micro-batches."""
        for batch in self.micro_batches[2 * number : 2 * number + 2]:
            with self.accelerator.accumulate(self.network):
                self.accelerator.backward(self.network(*batch))
                if self.accelerator.sync_gradients:
                    self.accelerator.clip_grad_norm_(self.network.parameters(), 0.5)
                self.optimizer.step()
                self.schedule.step()
                self.optimizer.zero_grad()


def whole_loop(
    make_optimizer: Callable[..., Optimizer],
    factors: tuple[float, ...],
    *,
    schedule: str = "LambdaLR",
    loss_scale: str = "dynamic",
    precision: str = "no",
    device: str = "cpu",
) -> Loop:
    """Return a loop with every feature of the step enabled."""
    accelerator = Accelerator(
        cpu=device == "cpu", gradient_accumulation_steps=2, mixed_precision=precision
    )
    config = StepConfig(
        use_clip_grad=True,
        local_norm=True,
        use_skip_data_by_global_norm=True,
        global_norm_spike_threshold=1e3,
    )
    step = attach(
        accelerator,
        config,
        lambda network: ExponentialMovingAverage(network, decay=0.99, warmup=True),
        scale_sense=LOSS_SCALES[loss_scale](),
    )
    network = Classifier()
    optimizer = make_optimizer(network.parameters())
    prepared = accelerator.prepare(network, optimizer, SCHEDULES[schedule](optimizer))
    numbers = [factor for factor in factors for _ in range(2)]
    micro_batches = [
        (inputs.to(device), labels.to(device), torch.full((), number, device=device))
        for (inputs, labels), number in zip(labelled_batches(len(numbers)), numbers, strict=True)
    ]
    return Loop(accelerator, step, *prepared, micro_batches)


def count_reads(loop: Loop) -> Iterator[tuple[bool, HostReads]]:
    """Yield, for each update, whether the update was skipped, and its host reads."""
    for number in range(len(loop.micro_batches) // 2):
        with HostReads() as counted:
            loop.update(number)
        yield loop.step.last_report.skipped.item(), counted


def assert_no_reads(loop: Loop, factors: tuple[float, ...]) -> None:
    """Check that no update reads on the host, and that all factors except 1 cause a skip."""
    steps = list(count_reads(loop))

    assert [counted.reads for _, counted in steps] == [[]] * len(factors)
    assert [skipped for skipped, _ in steps] == [factor != 1 for factor in factors]


@each_order
@each_fused
def test_the_loop_with_a_fused_optimizer_reads_nothing(make_optimizer, factors):
    """With a fused optimizer no update reads on the host, whether applied or skipped."""
    assert_no_reads(whole_loop(make_optimizer, factors), factors)


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("loss_scale", LOSS_SCALES)
def test_no_loss_scale_and_no_precision_reads(loss_scale, precision):
    """No update reads on the host with any kind of loss scale or precision."""
    factors = FACTORS["applied first"]
    loop = whole_loop(FUSED["AdamW"], factors, loss_scale=loss_scale, precision=precision)

    assert_no_reads(loop, factors)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_reads(schedule):
    """No schedule causes a host read, and the last update is counted only after a flush."""
    factors = FACTORS["applied first"]
    loop = whole_loop(FUSED["AdamW"], factors, schedule=schedule)

    assert_no_reads(loop, factors)

    torch_schedule = vars(loop.schedule)["scheduler"]
    assert torch_schedule.last_epoch == 3
    loop.step.flush()
    assert torch_schedule.last_epoch == 4


def test_the_schedule_between_micro_batches_leaves_the_result_pending():
    """A step of the schedule between micro-batches does not ask for the last update's result."""
    loop = whole_loop(FUSED["AdamW"], FACTORS["applied first"])
    loop.update(0)
    (window,) = loop.step.attachment.step.windows.values()

    with loop.accelerator.accumulate(loop.network):
        loop.accelerator.backward(loop.network(*loop.micro_batches[2]))
        loop.optimizer.step()
        loop.schedule.step()

    assert not loop.accelerator.sync_gradients
    assert not window.update.counts.outcome_is_known


def reads_of_plain_steps(make_optimizer: Callable[..., Optimizer], num_steps: int) -> list[int]:
    """Return the number of host reads of the plain optimizer in each step."""
    network = Classifier()
    optimizer = make_optimizer(network.parameters())
    reads = []
    for inputs, labels in labelled_batches(num_steps):
        network(inputs, labels).backward()
        with HostReads() as counted:
            optimizer.step()
        reads.append(len(counted.reads))
    return reads


@each_order
@pytest.mark.parametrize("make_optimizer", FOREACH.values(), ids=FOREACH)
def test_the_loop_with_a_foreach_optimizer_reads_once_an_update(make_optimizer, factors):
    """With a foreach optimizer, an update makes one host read besides those of the optimizer."""
    own_reads = iter(reads_of_plain_steps(make_optimizer, len(factors)))

    for skipped, counted in count_reads(whole_loop(make_optimizer, factors)):
        expected = 1 if skipped else 1 + next(own_reads)
        assert len(counted.reads) == expected


def test_a_loss_monitor_that_prints_every_step_reads_nothing(caplog):
    """A loss monitor that prints every step reads nothing on the host after the first step."""
    factors = FACTORS["applied first"]
    # Create the arguments before the loop, because TrainingArguments reset the state that all
    # accelerators share.
    arguments = TrainingArguments(output_dir="unused", use_cpu=True, report_to=[], max_steps=6)
    loop = whole_loop(FUSED["AdamW"], factors)
    caplog.set_level("INFO")
    handler = CallbackHandler([DefaultFlowCallback(), MFLossMonitor()], None, None, None, None)
    state = TrainerState(max_steps=len(factors), num_train_epochs=1, train_batch_size=8)
    events = functools.partial(
        handler.call_event, args=arguments, state=state, control=TrainerControl()
    )

    def monitored_update(number: int) -> None:
        events("on_step_begin")
        loop.update(number)
        state.global_step += 1
        step = loop.step
        events("on_step_end", step_output=step.last_output, step_report=step.last_report)

    events("on_train_begin")
    # The first update is not counted: it allocates the host buffers for the values of all steps.
    monitored_update(0)
    with HostReads() as counted:
        for number in range(1, len(factors)):
            monitored_update(number)
    events("on_train_end")

    assert counted.reads == []
    records = [r.getMessage() for r in caplog.records if "Epoch" in r.getMessage()]
    assert ["overflow cond: True" in record for record in records] == [
        math.isnan(factor) for factor in factors
    ]


@needs_backends
def test_the_loop_on_a_device_waits_once_and_then_only_if_asked():
    """On a simulated device rates equal those on a CPU, and the host waits just before an update.

    That wait is for the previous update. A question about the schedule takes its place. An
    optimizer that is not fused reads its flag, and then questions are free.
    """
    counted = run("support.device.ways:attached_loops")

    never, always, but_first = [0] * 6, [1] * 6, [0, 1, 1, 1, 1, 1]
    for optimizer in ("fused AdamW", "AdamWeightDecay", "fused SGD"):
        silent, asked = counted[f"{optimizer}, not asked"], counted[f"{optimizer}, asked"]
        assert (silent["reads"], silent["waits"]) == (never, but_first)
        assert (asked["reads"], asked["waits"], asked["asking"]) == (never, never, always)
    silent, asked = counted["SGD, not asked"], counted["SGD, asked"]
    assert (silent["reads"], silent["waits"]) == (always, but_first)
    assert (asked["reads"], asked["waits"], asked["asking"]) == (always, but_first, never)
    for found in counted.values():
        assert found["faults"] == []
        assert (
            found["rates"] == found["expected"] == [0.1, 0.05, *[0.025] * 2, *[0.0125] * 2, 0.00625]
        )


@pytest.fixture
def _default_sync_debug_mode() -> Iterator[None]:
    """Restore the default synchronization check after the test, even if the test fails."""
    yield
    torch.cuda.set_sync_debug_mode("default")


@pytest.mark.cuda
@pytest.mark.usefixtures("_default_sync_debug_mode")
@each_order
@each_fused
def test_the_loop_on_cuda_waits_for_nothing(make_optimizer, factors):
    """No update of a fused optimizer synchronizes with the device, not even the first."""
    loop = whole_loop(make_optimizer, factors, device="cuda")

    torch.cuda.set_sync_debug_mode("error")
    reports = []
    for number in range(len(factors)):
        loop.update(number)
        reports.append(loop.step.last_report)
    torch.cuda.set_sync_debug_mode("default")

    assert [report.skipped.item() for report in reports] == [factor != 1 for factor in factors]
    assert all(parameter.is_cuda for parameter in loop.network.parameters())
