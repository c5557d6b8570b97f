"""Measure the host's time for everything after backward: mfwrap compared with torch and accelerate.

    python benchmarks/host.py                        # 28, 292 and 1,156 small tensors
    python benchmarks/host.py --tensors 292 --width 64
    python benchmarks/host.py --device cuda

The tensors are small, so the time is that of Python and of torch's dispatcher, not of the
arithmetic. On a GPU this is the time in which the host queues the work, and the device has nothing
else to do when the time begins. All contestants update the
same number of float32 parameters, half of them matrices of ``width`` x ``width`` and half of them
vectors, from the same gradients, with fused AdamW, clipping by the global norm and a schedule.
They take turns, in an order that changes from round to round. Plain torch and stock accelerate are
given a list of parameters that is made once.

The column "Python calls" counts the calls of Python functions and of functions in C from Python in
one update. It does not depend on the machine's mood.
"""

import abc
import argparse
import random
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from mfwrap import (
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    MFTrainOneStepCell,
    StepConfig,
)
from mfwrap.accelerate import attach
from mfwrap.step.losses import Accumulated

LOSS_SCALE = 2.0**16
MAX_GRAD_NORM = 1.0
DECAY = 0.999
LEARNING_RATE = 1e-4
LEFT_OUT = 10
"""Number of first rounds that do not count."""


class _HandOut(torch.autograd.Function):
    """Give each parameter a gradient that is ready, in place of a backward."""

    @staticmethod
    def forward(context: Any, gradients: Sequence[Tensor], *_: Tensor) -> Tensor:
        context.gradients = gradients
        return torch.zeros((), device=gradients[0].device)

    @staticmethod
    def backward(context: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        return (None, *context.gradients)


class Network(nn.Module):
    """Network of many small parameters, whose backward hands out gradients.

    Args:
        num_tensors: Number of parameters.
        width: Width of each second one, which is square; the others are vectors.
    """

    def __init__(self, num_tensors: int, width: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = ((width, width) if index % 2 else (width,) for index in range(num_tensors))
        self.weights = nn.ParameterList(torch.randn(s, generator=generator) for s in shapes)
        self.own = list(self.weights)
        self.gradients: list[Tensor] = []

    def forward(self) -> Tensor:
        loss: Tensor = _HandOut.apply(self.gradients, *self.own)  # type: ignore[no-untyped-call]  # (torch has no annotations here)
        return loss


class Contestant(abc.ABC):
    """One way to update the parameters of a network after backward.

    Args:
        num_tensors: As in `Network`.
        width: As in `Network`.
        device: Type of the device of all tensors.
    """

    name: str
    compared_with: str
    """Name of the contestant that does the same without mfwrap."""

    def __init__(self, num_tensors: int, width: int, device: str = "cpu") -> None:
        self.device = device
        self.network = Network(num_tensors, width).to(device)
        self.parameters: list[Tensor] = list(self.network.parameters())
        self.optimizer = torch.optim.AdamW(self.parameters, LEARNING_RATE, fused=True)
        self.schedule = LambdaLR(self.optimizer, lambda step: 1 / (1 + 1e-4 * step))
        self.gradients = [torch.randn_like(weight) * 1e-3 for weight in self.parameters]

    def backward(self) -> None:
        """Give each parameter a copy of its gradient."""
        for parameter, gradient in zip(self.parameters, self.gradients, strict=True):
            parameter.grad = gradient.clone()

    @abc.abstractmethod
    def update(self) -> None:
        """Do everything after backward."""


class Plain(Contestant):
    """Use torch alone."""

    name = compared_with = "torch: clip, AdamW, schedule"

    def update(self) -> None:
        nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()


class PlainWithEverything(Contestant):
    """Use torch's GradScaler, one foreach call for the norms, and one for the average."""

    name = compared_with = "torch: the same, GradScaler, norms, average"

    def __init__(self, num_tensors: int, width: int, device: str = "cpu") -> None:
        super().__init__(num_tensors, width, device)
        self._scaler = torch.amp.GradScaler(device, init_scale=LOSS_SCALE, growth_interval=10**6)
        # Call `scale` once, because the first call creates the scale, which `unscale_` needs.
        self._scaler.scale(torch.zeros((), device=device))
        self._averages = [weight.detach().clone() for weight in self.parameters]

    @torch.no_grad()
    def update(self) -> None:
        self._scaler.unscale_(self.optimizer)
        gradients = [weight.grad for weight in self.parameters if weight.grad is not None]
        torch.stack(torch._foreach_norm(gradients))
        nn.utils.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self._scaler.step(self.optimizer)
        self._scaler.update()
        self.schedule.step()
        torch._foreach_lerp_(self._averages, self.parameters, 1 - DECAY)
        self.optimizer.zero_grad()


class Cell(Contestant):
    """Use what `MFTrainOneStepCell` does after backward."""

    name = "mfwrap, cell: clip, AdamW, schedule"
    compared_with = Plain.name

    def __init__(self, num_tensors: int, width: int, device: str = "cpu") -> None:
        super().__init__(num_tensors, width, device)
        self._accumulated = Accumulated(torch.zeros((), device=device), None)
        self._update = vars(self.make_cell())["_MFTrainOneStepCell__update"]

    def make_cell(self) -> MFTrainOneStepCell:
        return MFTrainOneStepCell(
            self.network, self.optimizer, use_clip_grad=True, lr_scheduler=self.schedule
        )

    def update(self) -> None:
        self._update(self._accumulated)


class CellWithEverything(Cell):
    """Use the cell with a dynamic scale, norms by parameter and an average."""

    name = "mfwrap, cell: the same, scale, norms, average"
    compared_with = PlainWithEverything.name

    def make_cell(self) -> MFTrainOneStepCell:
        return MFTrainOneStepCell(
            self.network,
            self.optimizer,
            use_clip_grad=True,
            scale_sense=DynamicLossScaleUpdateCell(LOSS_SCALE, 2, 10**6),
            local_norm=True,
            lr_scheduler=self.schedule,
            ema=ExponentialMovingAverage(self.network, DECAY),
        )


class Stock(Contestant):
    """Use an accelerate loop as it is."""

    name = compared_with = "accelerate: clip, AdamW, schedule"

    def __init__(self, num_tensors: int, width: int, device: str = "cpu") -> None:
        super().__init__(num_tensors, width, device)
        self._accelerator = Accelerator(cpu=device == "cpu")
        self.prepare(self._accelerator)
        self._network, self._optimizer, self._schedule = self._accelerator.prepare(
            self.network, self.optimizer, self.schedule
        )

    def prepare(self, accelerator: Accelerator) -> None:
        """Do what comes before ``accelerator.prepare``."""

    def backward(self) -> None:
        self.network.gradients = [gradient.clone() for gradient in self.gradients]
        self._accelerator.backward(self._network())

    def update(self) -> None:
        self._accelerator.clip_grad_norm_(self.parameters, MAX_GRAD_NORM)
        self._optimizer.step()
        self._schedule.step()
        self._optimizer.zero_grad()


class Attached(Stock):
    """Use the same loop with `attach`."""

    name = "mfwrap, attach: clip, AdamW, schedule"
    compared_with = Stock.name

    def prepare(self, accelerator: Accelerator) -> None:
        attach(accelerator)


class AttachedWithEverything(Stock):
    """Use the same loop with `attach`, norms by parameter and an average."""

    name = "mfwrap, attach: the same, norms, average"
    compared_with = Stock.name

    def prepare(self, accelerator: Accelerator) -> None:
        average = ExponentialMovingAverage(self.network, DECAY)
        attach(accelerator, StepConfig(local_norm=True), average)


CONTESTANTS: tuple[type[Contestant], ...] = (
    Plain,
    Cell,
    PlainWithEverything,
    CellWithEverything,
    Stock,
    Attached,
    AttachedWithEverything,
)


def count_calls(function: Callable[[], None]) -> int:
    """Return how many functions, of Python and of C, are called from Python."""
    count = 0

    def profile(_: Any, event: str, __: Any) -> None:
        nonlocal count
        count += event in {"call", "c_call"}

    sys.setprofile(profile)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def measure(contestants: Sequence[Contestant], rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each contestant's updates, by round."""
    seconds: dict[str, list[float]] = {contestant.name: [] for contestant in contestants}
    order = random.Random(0)  # noqa: S311  (not cryptographic)
    turns = list(contestants)
    for number in range(LEFT_OUT + rounds):
        order.shuffle(turns)
        for contestant in turns:
            contestant.backward()
            if contestant.device == "cuda":
                torch.cuda.synchronize()  # a full queue would stop the host
            start = time.perf_counter()
            contestant.update()
            if number >= LEFT_OUT:
                seconds[contestant.name].append(time.perf_counter() - start)
    return seconds


def report(contestants: Sequence[Contestant], seconds: dict[str, list[float]]) -> None:
    """Print the table, with one row per contestant."""
    print(
        "| everything after backward | ms, median (quartiles) | of the one without mfwrap "
        "| Python calls |\n| --- | --- | --- | --- |"
    )
    for contestant in contestants:
        times, others = seconds[contestant.name], seconds[contestant.compared_with]
        low, median, high = (each * 1e3 for each in statistics.quantiles(times, n=4))
        ratio = statistics.median(a / b for a, b in zip(times, others, strict=True))
        contestant.backward()
        calls = count_calls(contestant.update)
        spread = f"{median:.2f} ({low:.2f} to {high:.2f})"
        print(f"| {contestant.name} | {spread} | {ratio:.2f} | {calls} |")


def main() -> None:
    """Measure all contestants, and print a table for each number of tensors."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tensors", type=int, nargs="+", default=[28, 292, 1156])
    parser.add_argument("--width", type=int, default=32, help="width of the matrices (default: 32)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--rounds", type=int, default=200, help="measured rounds (default: 200)")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message=".*lr_scheduler.*")
    torch.set_num_threads(1)
    for number in arguments.tensors:
        contestants = [kind(number, arguments.width, arguments.device) for kind in CONTESTANTS]
        size = sum(weight.numel() for weight in contestants[0].parameters)
        print(
            f"\n{number} tensors, {size / 1e3:.0f} thousand float32 parameters on "
            f"{arguments.device}, 1 thread, torch "
            f"{torch.__version__}, {arguments.rounds} rounds\n"
        )
        report(contestants, measure(contestants, arguments.rounds))


if __name__ == "__main__":
    main()
