"""Captured steps on the simulated device: their numbers, and faults that are planted into them."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mfwrap import DynamicLossScaleUpdateCell, ExponentialMovingAverage, MFTrainOneStepCell
from mfwrap.step import captured
from mfwrap.step.static_memory import StaticBatch
from support.device.device import Device

__all__ = ["found"]

FACTORS = (1.0, 1.0, float("nan"), 1.0, 1.0, 1.0, float("nan"), 1.0, 50.0, 1.0, 1.0, 1.0, 1.0, 1.0)
"""Factors of the losses of successive updates. The graph is captured at the fourth."""


class Network(nn.Module):
    """Small network that counts the calls of its forward.

    Args:
        reads: Whether it reads its loss on the host.
        fails_at: Number of the call that raises an error; 0 for none.
    """

    def __init__(self, *, reads: bool = False, fails_at: int = 0) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 1)
        self.register_buffer("steps", torch.zeros(()))
        self.calls = 0
        self._reads, self._fails_at = reads, fails_at

    def forward(self, inputs: Tensor, factor: Tensor) -> Tensor:
        self.calls += 1
        self.steps += 1
        loss: Tensor = (self.second(self.first(inputs).tanh()).square() * factor).mean()
        if self._reads and self.calls > 1:
            loss.item()
        if self.calls == self._fails_at:
            msg = "a kernel that cannot be captured"
            raise RuntimeError(msg)
        return loss


class Training:
    """Updates of a cell with everything on.

    Args:
        device: Training device.
        capture: Whether to capture the updates.
        reads: See `Network`.
        fails_at: See `Network`.
        optimizer: Makes the optimizer.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        capture: bool,
        reads: bool = False,
        fails_at: int = 0,
        optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW,
    ) -> None:
        torch.manual_seed(0)
        self.network = Network(reads=reads, fails_at=fails_at).to(device)
        self.optimizer = optimizer(self.network.parameters(), lr=2.0**-4, fused=True)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda n: 2.0**-n)
        self.cell = MFTrainOneStepCell(
            self.network,
            self.optimizer,
            use_clip_grad=True,
            scale_sense=DynamicLossScaleUpdateCell(1024.0, 2, 3),
            local_norm=True,
            gradient_accumulation_steps=2,
            lr_scheduler=self.schedule,
            ema=ExponentialMovingAverage(self.network, 0.9, warmup=True),
            spike_policy="clip",
            capture=capture,
        )
        self._batches = torch.randn(len(FACTORS), 6, 4).to(device)
        self._factors = [torch.full((6, 1), factor).to(device) for factor in FACTORS]
        self._reports: list[Any] = []

    def update(self, number: int) -> None:
        """Do an update, and change what a loop may change between two updates."""
        if number == 5:
            self.network.first.bias.requires_grad_(False)  # noqa: FBT003  (torch's signature)
        if number == 7:
            self.network.first.bias.requires_grad_(True)  # noqa: FBT003  (torch's signature)
            self.optimizer.load_state_dict(self.optimizer.state_dict())
        if number == 4:
            self._early = tree_map(Tensor.clone, self.cell.state_dict())
        if number == 9:
            self.cell.load_state_dict(self._early)
            self.cell.set_sense_scale(torch.full((), 4.0))
        if number == 11:
            self.cell.flush()
            self.schedule.last_epoch = 0
            self.optimizer.param_groups[0]["lr"] = 2.0**-5
        self.cell(self._batches[number], self._factors[number])
        self._reports.append(self.cell.last_report)

    def numbers(self) -> list[float]:
        """Return all numbers of all reports, and the state at the end."""
        self.cell.flush()
        reported = [
            value
            for each in self._reports
            for value in (
                *each.output,
                each.skipped,
                each.applied_updates,
                each.skipped_updates,
                each.consecutive_skips,
                each.learning_rates,
                each.spike_score,
            )
        ]
        assert self.cell.ema is not None
        averages = [average for _, average in self.cell.ema.named_averages()]
        state = [*self.network.parameters(), self.network.steps, *averages]
        rates = [group["lr"] for group in self.optimizer.param_groups]
        flat = [float(x) for tensor in (*reported, *state) for x in tensor.detach().cpu().ravel()]
        return [*flat, *rates, float(self.schedule.last_epoch)]


def _steps(
    device: Device, planted: AbstractContextManager[Any] | None = None, **settings: Any
) -> dict[str, Any]:
    training = Training(device.device, capture=True, **settings)
    faults, reads, synchronizations, waits, errors = [], [], [], [], []
    with nullcontext() if planted is None else planted:
        for number in range(len(FACTORS)):
            changes = number in {4, 5, 7, 9, 11}
            with device.watching() as watch:
                try:
                    training.update(number)
                except RuntimeError as error:
                    errors.append(str(error))
                    training.update(number)
            faults += [str(fault) for fault in watch.faults]
            if not changes:
                reads += watch.reads
                synchronizations += watch.synchronizations
                waits += watch.waits
    optimizer = settings.get("optimizer", torch.optim.AdamW)
    plain = Training(torch.device("cpu"), capture=False, optimizer=optimizer)
    for number in range(len(FACTORS)):
        plain.update(number)
    return {
        "numbers": training.numbers(),
        "expected": plain.numbers(),
        "forwards": [training.network.calls, plain.network.calls],
        "faults": faults,
        "reads": reads,
        "synchronizations": synchronizations,
        "waits": waits,
        "errors": errors,
    }


class _Bound(StaticBatch):
    """Batch that is not copied."""

    def load(self, calls: Any) -> None:
        self.calls = list(calls)


CASES: dict[str, Callable[[Device], dict[str, Any]]] = {
    "AdamW": _steps,
    "SGD": lambda device: _steps(
        device,
        optimizer=lambda weights, **settings: torch.optim.SGD(weights, momentum=0.9, **settings),
    ),
    "state in new tensors": lambda device: _steps(
        device, patch.object(captured, "_write_back", lambda *_: None)
    ),
    "a batch that is not copied": lambda device: _steps(
        device, patch.object(captured, "StaticBatch", _Bound)
    ),
    "a network that reads its loss": lambda device: _steps(device, reads=True),
    "a capture that fails": lambda device: _steps(device, fails_at=7),
}


def found() -> dict[str, Any]:
    """Return what each case has shown, by its name."""
    device = Device()
    return {name: case(device) for name, case in CASES.items()}
