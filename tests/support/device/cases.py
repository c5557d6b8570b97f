"""Faults that only show on a device, planted into mfwrap, and the same without the fault."""

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage, MFTrainOneStepCell
from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.callbacks.training_state.metrics import _Numbers
from mfwrap.loss_scale.live import LossScale
from mfwrap.step.losses import Accumulated
from mfwrap.tensors import deferred
from mfwrap.tensors.deferred import DeferredReads
from mfwrap.tensors.norms import NormReader
from mfwrap.tensors.sharded_norms import tensor_norms
from support.device.clocks import Watch
from support.device.device import Device

__all__ = ["found"]

Case = Callable[[Device], Watch]


class Step:
    """A step of a small network with everything on.

    Args:
        device: The device.
        settings: Further settings of the cell.
    """

    def __init__(self, device: Device, **settings: Any) -> None:
        torch.manual_seed(0)
        self.network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).to(device.device)
        self.loss = _Loss(self.network)
        self.optimizer = torch.optim.AdamW(self.network.parameters(), 1e-2, fused=True)
        self.cell = MFTrainOneStepCell(
            self.loss,
            self.optimizer,
            use_clip_grad=True,
            scale_sense=DynamicLossScaleUpdateCell(1024.0, 2, 2),
            local_norm=True,
            ema=ExponentialMovingAverage(self.loss, 0.9),
            **settings,
        )
        self.batch = torch.randn(3, 4).to(device.device)

    def __call__(self) -> Any:
        return self.cell(self.batch)


class _Loss(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, inputs: Tensor) -> Tensor:
        loss: Tensor = self.network(inputs).square().mean()
        return loss


def steps(device: Device, number: int = 3, step: Step | None = None) -> Watch:
    """Return what happens in steps of a cell."""
    step = Step(device) if step is None else step
    with device.watching() as watch:
        for _ in range(number):
            step()
    return watch


def step_with(device: Device, owner: Any, name: str, substitute: Any) -> Watch:
    """Return what happens in steps while a function of mfwrap is replaced."""
    step = Step(device)
    with patch.object(owner, name, substitute):
        return steps(device, step=step)


def host_read_in_the_norms(device: Device) -> Watch:
    squares = NormReader.squares

    def reading(reader: NormReader, tensors: Any) -> Tensor:
        found = squares(reader, tensors)
        return found if found.max().item() > 0 else found * 1

    return step_with(device, NormReader, "squares", reading)


def event_reused(device: Device) -> Watch:
    submit = DeferredReads.submit

    def reusing(reads: DeferredReads, values: Tensor, receive: Any) -> None:
        submit(reads, values, receive)
        mailbox, _ = reads._pending[-1]
        reads._free[values.numel()].append(mailbox)

    with patch.object(DeferredReads, "submit", reusing):
        return reads_of_two_steps(device)


def reads_of_two_steps(device: Device) -> Watch:
    """Return what happens when two vectors are on their way to the host at once."""
    reads, received = DeferredReads(device.device), []
    with device.watching() as watch:
        for number in range(2):
            vector = torch.full((3,), float(number), device=device.device)
            reads.submit(vector, received.append)
        reads.flush()
    if not watch.faults and received != [[0.0] * 3, [1.0] * 3]:
        watch.reads.append(f"received {received}")
    return watch


def pinned_buffer_read_early(device: Device) -> Watch:
    class Impatient(cast("Any", torch.Event)):  # type: ignore[misc]  # (the device's own event)
        def synchronize(self) -> None:
            pass

    with patch.object(deferred.torch, "Event", Impatient):
        step = Step(device, lr_scheduler=None)
        return steps(device, step=step)


def missing_record_stream(device: Device, *, recorded: bool = False) -> Watch:
    side = device.new_stream()
    with device.watching() as watch:
        gradient = torch.ones(8, device=device.device)
        side.wait_stream(device.stream)
        with device.on(side):
            norm = gradient.norm()
        if recorded:
            gradient.record_stream(cast("Any", side))
        del gradient
        device.stream.wait_stream(side)
        norm + 1
    return watch


def copy_from_unpinned_memory(device: Device) -> Watch:
    def members(reader: NormReader, tensors: Any) -> Tensor:
        order = torch.tensor(range(len(tensors)), device=device.device)
        return squares(reader, tensors).index_select(0, order)

    squares = NormReader.squares
    return step_with(device, NormReader, "squares", members)


class _Waiting(TrainingStateMonitor):
    def on_step_end(self, *args: Any, **keywords: Any) -> None:
        torch.accelerator.synchronize()
        super().on_step_end(*args, **keywords)


def monitored(device: Device, monitor: type[TrainerCallback] = TrainingStateMonitor) -> Watch:
    """Return what happens in steps 11 to 22 of a loop with a monitor: everything is set up."""
    step = Step(device)
    state, control = TrainerState(max_steps=22), TrainerControl()
    with tempfile.TemporaryDirectory() as folder:
        watching = monitor(folder=folder)  # type: ignore[call-arg]  # (a monitor's)
        args = TrainingArguments(folder, use_cpu=True, report_to="none")
        events: dict[str, Any] = {"model": step.loss, "optimizer": step.optimizer}
        watching.on_train_begin(args, state, control, **events)
        for part in (10, 12):
            with device.watching() as watch:
                for _ in range(part):
                    watching.on_step_begin(args, state, control, **events)
                    output = step()
                    state.global_step += 1
                    reported = {"step_output": output, "step_report": step.cell.last_report}
                    watching.on_step_end(args, state, control, **events, **reported)
        watching.on_train_end(args, state, control, **events)
    return watch


def numbers_of_two_devices(device: Device) -> Watch:
    """Return what happens when a monitor brings numbers of the CPU and of the device together."""
    weights = [torch.ones(3), torch.ones(4, device=device.device)]
    received: list[list[float]] = []
    reads = DeferredReads(device.device)
    with device.watching() as watch:
        found = _Numbers()
        for number, weight in enumerate(weights):
            found.add([f"{number}"], None, weight.square().sum())
        found.add(["2", "3"], None, tensor_norms(weights).square())
        numbers = found.packed().values
        assert numbers is not None
        reads.submit(numbers, received.append)
        reads.flush()
    if received != [[3.0, 4.0, 3.0, 4.0]]:
        watch.reads.append(f"received {received}")
    # The numbers of the CPU are in memory that is not pinned. The host waits until they are copied.
    assert {each.partition(" at ")[0] for each in watch.synchronizations} == {
        "copy from unpinned memory"
    }
    watch.synchronizations.clear()
    return watch


def synchronization_in_a_monitor(device: Device) -> Watch:
    return monitored(device, _Waiting)


def captured(device: Device, captures: Callable[[], Any] = nullcontext) -> Watch:
    """Return what happens in the arithmetic of an update, which a graph may hold."""
    step = Step(device, max_consecutive_skips=None)
    step()
    step.loss(step.batch).backward()
    step.optimizer.param_groups[0]["capturable"] = True  # as a captured step does
    accumulated = Accumulated(torch.zeros((), device=device.device), None)
    with device.watching() as watch, captures():
        step.cell._MFTrainOneStepCell__update(accumulated)
    return watch


def read_inside_a_capture(device: Device) -> Watch:
    step = Step(device)
    step()
    step.optimizer.param_groups[0]["capturable"] = True  # as a captured step does
    with device.watching() as watch, device.capturing():
        step()
    return watch


def wrong_stream(device: Device, *, waits: bool = False) -> Watch:
    squares = NormReader.squares
    side = device.new_stream()

    def on_side(reader: NormReader, tensors: Any) -> Tensor:
        main = device.stream
        if waits:
            side.wait_stream(main)
        with device.on(side):
            found = squares(reader, tensors)
        if waits:
            for tensor in (*tensors, found):
                tensor.record_stream(main)
                tensor.record_stream(side)
            main.wait_stream(side)
        return found

    return step_with(device, NormReader, "squares", on_side)


def loss_scale_from_pinned_memory(device: Device, *, early: bool = False) -> Watch:
    """Return what happens when a loop sets the scale from pinned memory that it then changes."""
    scale = LossScale(1.0, device.device)
    own = torch.full((), 8.0).pin_memory()
    with device.watching() as watch:
        if early:
            scale.value.copy_(own, non_blocking=True)
        else:
            scale.set(own)
        own.fill_(0.0)
    if scale.value.item() != 8:
        watch.reads.append(f"the scale is {scale.value.item()}")
    return watch


def discarded(device: Device) -> Watch:
    """Return what happens when copies that are on their way are dropped, as a load does."""
    reads, received = DeferredReads(device.device), []
    with device.watching() as watch:
        reads.submit(torch.zeros(3, device=device.device), received.append)
        reads.discard()
        reads.submit(torch.ones(3, device=device.device), received.append)
        reads.flush()
    if received != [[1.0] * 3]:
        watch.reads.append(f"received {received}")
    return watch


PLANTED: dict[str, Case] = {
    "a host read in the norms": host_read_in_the_norms,
    "an event reused": event_reused,
    "a pinned buffer read early": pinned_buffer_read_early,
    "a missing record_stream": missing_record_stream,
    "a copy from unpinned memory": copy_from_unpinned_memory,
    "a synchronization in a monitor": synchronization_in_a_monitor,
    "a read inside a capture": read_inside_a_capture,
    "a wrong stream": wrong_stream,
    "a pinned buffer written early": lambda device: loss_scale_from_pinned_memory(
        device, early=True
    ),
}

CLEAN: dict[str, Case] = {
    "steps of a cell": steps,
    "two copies to the host": reads_of_two_steps,
    "a recorded stream": lambda device: missing_record_stream(device, recorded=True),
    "a monitor": monitored,
    "a monitor of a network on two devices": numbers_of_two_devices,
    "an update inside a capture": lambda device: captured(device, device.capturing),
    "a side stream that waits": lambda device: wrong_stream(device, waits=True),
    "a scale from pinned memory": loss_scale_from_pinned_memory,
    "dropped copies": discarded,
}


@contextmanager
def _named(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        error.add_note(f"in the case {name!r}")
        raise


def found() -> dict[str, dict[str, list[str]]]:
    """Return what each case has shown, by its name."""
    device = Device()
    result = {}
    for name, case in {**PLANTED, **CLEAN}.items():
        with _named(name):
            watch = case(device)
        result[name] = {
            "faults": list(map(str, watch.faults)),
            "kinds": watch.kinds(),
            "reads": watch.reads,
            "synchronizations": watch.synchronizations,
            "waits": watch.waits,
        }
    return result
