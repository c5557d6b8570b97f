"""Ways to run a whole training step of one micro-batch: torch alone, accelerate, and mfwrap.

Each function returns a call that does one step with fused AdamW. A call never reads a value on the
host, except where the library that it uses does.
"""

from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from device.networks import Batch, loss_of
from device.setup import Setup
from mfwrap import (
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
    StepConfig,
)
from mfwrap.accelerate import attach

LOSS_SCALE = 2.0**10
"""Small enough to overflow in none of the networks."""
WINDOW = 10**6
MAX_GRAD_NORM = 1.0
DECAY = 0.999
RATE = 1e-4

Step = Callable[[], object]
Way = Callable[[Setup, nn.Module, Batch], Step]


def adamw(network: nn.Module, rate: float = RATE) -> torch.optim.AdamW:
    """Return fused AdamW."""
    return torch.optim.AdamW(network.parameters(), rate, fused=True)


def schedule_of(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Return a schedule whose rate falls in each step."""
    return LambdaLR(optimizer, lambda step: 1 / (1 + 1e-4 * step))


def dynamic_scale() -> DynamicLossScaleUpdateCell:
    """Return a dynamic loss scale that neither grows nor falls in a measurement."""
    return DynamicLossScaleUpdateCell(LOSS_SCALE, 2, WINDOW)


def forget_accelerators() -> None:
    """Let the next accelerator have another precision than the last one."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def forward_and_backward(_: Setup, network: nn.Module, batch: Batch) -> Step:
    """Compute gradients and release them: what every step has to do."""

    def step() -> None:
        loss_of(network(**batch)).backward()
        network.zero_grad()

    return step


def plain(_: Setup, network: nn.Module, batch: Batch) -> Step:
    """Use torch alone: clip, AdamW, schedule."""
    parameters, optimizer = list(network.parameters()), adamw(network)
    schedule = schedule_of(optimizer)

    def step() -> None:
        loss_of(network(**batch)).backward()
        nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

    return step


def plain_with_everything(setup: Setup, network: nn.Module, batch: Batch) -> Step:
    """Use torch alone, with GradScaler, one call for the norms and one for the average."""
    parameters: list[Tensor] = list(network.parameters())
    optimizer = adamw(network)
    schedule = schedule_of(optimizer)
    scaler = torch.amp.GradScaler(setup.kind, init_scale=LOSS_SCALE, growth_interval=WINDOW)
    averages = [parameter.detach().clone() for parameter in parameters]

    @torch.no_grad()
    def update() -> None:
        scaler.unscale_(optimizer)
        gradients = [each.grad for each in parameters if each.grad is not None]
        torch.stack(torch._foreach_norm(gradients))
        nn.utils.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        torch._foreach_lerp_(averages, parameters, 1 - DECAY)
        optimizer.zero_grad()

    def step() -> None:
        scaler.scale(loss_of(network(**batch))).backward()
        update()

    return step


def cell(_: Setup, network: nn.Module, batch: Batch) -> Step:
    """Use `MFTrainOneStepCell`: clip, AdamW, schedule."""
    optimizer = adamw(network)
    trained = MFTrainOneStepCell(
        network, optimizer, use_clip_grad=True, lr_scheduler=schedule_of(optimizer)
    )
    return lambda: trained(**batch)


def full_cell(
    network: nn.Module,
    rate: float = RATE,
    make_schedule: Callable[[torch.optim.Optimizer], LRScheduler] = schedule_of,
    **changes: Any,
) -> MFTrainOneStepCell:
    """Return a cell with clipping, a dynamic scale, norms, an average and a schedule."""
    optimizer = adamw(network, rate)
    settings: dict[str, Any] = {
        "use_clip_grad": True,
        "max_grad_norm": MAX_GRAD_NORM,
        "scale_sense": dynamic_scale(),
        "local_norm": True,
        "lr_scheduler": make_schedule(optimizer),
        "ema": ExponentialMovingAverage(network, DECAY),
    }
    return MFTrainOneStepCell(network, optimizer, **(settings | changes))


def cell_with_everything(_: Setup, network: nn.Module, batch: Batch) -> Step:
    """Use the cell with everything that `full_cell` has."""
    trained = full_cell(network)
    return lambda: trained(**batch)


def captured_cell(_: Setup, network: nn.Module, batch: Batch) -> Step:
    """Use the same cell, whose whole update is one graph of the device."""
    trained = full_cell(network, capture=True)
    return lambda: trained(**batch)


def _loop(accelerator: Accelerator, network: nn.Module, batch: Batch) -> Step:
    optimizer = adamw(network)
    network, prepared, schedule = accelerator.prepare(network, optimizer, schedule_of(optimizer))
    parameters = list(network.parameters())

    def step() -> None:
        accelerator.backward(loss_of(network(**batch)))
        accelerator.clip_grad_norm_(parameters, MAX_GRAD_NORM)
        prepared.step()
        schedule.step()
        prepared.zero_grad()

    return step


def accelerate_loop(setup: Setup, network: nn.Module, batch: Batch) -> Step:
    """Use an accelerate loop as it is: clip, AdamW, schedule."""
    return _loop(Accelerator(cpu=not setup.on_cuda), network, batch)


def attached_loop(setup: Setup, network: nn.Module, batch: Batch) -> Step:
    """Use the same loop with `attach`."""
    accelerator = Accelerator(cpu=not setup.on_cuda)
    attach(accelerator)
    return _loop(accelerator, network, batch)


def attached_with_everything(setup: Setup, network: nn.Module, batch: Batch) -> Step:
    """Use the same loop with `attach`, a dynamic scale, norms and an average."""
    accelerator = Accelerator(cpu=not setup.on_cuda)
    attach(
        accelerator,
        StepConfig(local_norm=True),
        lambda model: ExponentialMovingAverage(model, DECAY),
        scale_sense=dynamic_scale(),
    )
    return _loop(accelerator, network, batch)


BARE = "forward and backward"
PLAIN = "torch: clip, AdamW, schedule"
PLAIN_EVERYTHING = "torch: the same, GradScaler, norms, average"
STOCK = "accelerate: clip, AdamW, schedule"
CAPTURED = "mfwrap, captured cell: the same"

WAYS: dict[str, tuple[Way, str]] = {
    BARE: (forward_and_backward, BARE),
    PLAIN: (plain, PLAIN),
    "mfwrap, cell: clip, AdamW, schedule": (cell, PLAIN),
    PLAIN_EVERYTHING: (plain_with_everything, PLAIN_EVERYTHING),
    "mfwrap, cell: the same, scale, norms, average": (cell_with_everything, PLAIN_EVERYTHING),
    CAPTURED: (captured_cell, PLAIN_EVERYTHING),
    STOCK: (accelerate_loop, STOCK),
    "mfwrap, attach: clip, AdamW, schedule": (attached_loop, STOCK),
    "mfwrap, attach: the same, scale, norms, average": (attached_with_everything, STOCK),
}
"""By name: the way, and the name of the one without mfwrap that it is compared with."""
