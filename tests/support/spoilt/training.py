"""Train with bad gradients on demand, in several precisions and with several optimizers."""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from mfwrap import ExponentialMovingAverage, MFTrainOneStepCell, StepReport
from support.small_networks import Classifier
from support.training_state import training_state

__all__ = ["OPTIMIZERS", "PRECISIONS", "BadElement", "Precision", "SpoiltTraining"]

# AdamW gets an eps of 1e-4, because its default of 1e-8 is zero in float16.
OPTIMIZERS = {
    "fused AdamW": lambda parameters: AdamW(parameters, lr=1e-2, eps=1e-4, fused=True),
    "foreach AdamW": lambda parameters: AdamW(parameters, lr=1e-2, eps=1e-4, foreach=True),
    "fused SGD": lambda parameters: SGD(parameters, lr=0.1, momentum=0.9, fused=True),
    "fused SGD with dampening": lambda parameters: SGD(
        parameters, lr=0.1, momentum=0.9, dampening=0.5, fused=True
    ),
    "SGD with dampening": lambda parameters: SGD(
        parameters, lr=0.1, momentum=0.9, dampening=0.5, fused=False
    ),
    "Adafactor": lambda parameters: Adafactor(parameters, lr=1e-2),
}


class Precision(NamedTuple):
    """The dtype of the weights and the dtype of autocast, if it is used."""

    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None

    def context(self, device_type: str) -> contextlib.AbstractContextManager:
        """Return the context of the forward: autocast, or a null context without autocast."""
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(device_type, dtype=self.autocast)


PRECISIONS = {
    "float32": Precision(),
    "bf16 autocast": Precision(autocast=torch.bfloat16),
    "fp16 autocast": Precision(autocast=torch.float16),
    "bf16 weights": Precision(weights=torch.bfloat16),
    "fp16 weights": Precision(weights=torch.float16),
}


class BadElement:
    """Put a value into one element of a parameter's gradient while `active`."""

    def __init__(self, parameter: nn.Parameter, value: float) -> None:
        self.active = False
        self._value = value
        parameter.register_hook(self._on_gradient)

    def _on_gradient(self, gradient: Tensor) -> Tensor | None:
        if not self.active:
            return None
        bad = gradient.clone()
        bad.view(-1)[3] = self._value
        return bad


class SpoiltTraining:
    """Train a cell with a schedule and an average, and spoil gradients on demand."""

    def __init__(
        self,
        make_optimizer: Callable[..., Optimizer],
        precision: Precision = PRECISIONS["float32"],
        *,
        value: float = float("nan"),
        device: str = "cpu",
        **settings,
    ) -> None:
        torch.manual_seed(0)
        self.precision = precision
        self.network = Classifier().to(device, precision.weights)
        self.optimizer = make_optimizer(self.network.parameters())
        self.schedule = LambdaLR(self.optimizer, lambda step: 1 / (1 + step))
        self.ema = ExponentialMovingAverage(self.network, decay=0.9, warmup=True)
        self.bad_element = BadElement(self.network.layers[0].weight, value)
        self.cell = MFTrainOneStepCell(
            self.network,
            self.optimizer,
            **{
                "use_clip_grad": True,
                "max_grad_norm": 0.5,
                "scale_sense": 2.0**8,
                "lr_scheduler": self.schedule,
                "ema": self.ema,
                **settings,
            },
        )

    def step(self, batch: tuple[Tensor, Tensor], *, bad: bool = False) -> StepReport:
        """Run one step, with or without the bad element in its gradient."""
        inputs, labels = batch
        self.bad_element.active = bad
        with self.precision.context(inputs.device.type):
            self.cell(inputs.to(self.precision.weights), labels)
        return self.cell.last_report

    def state(self) -> dict:
        """Return weights, optimizer state and schedule state, which a skip must not change."""
        self.cell.flush()
        return training_state(self.network, self.optimizer, self.schedule)

    def averages(self) -> dict[str, Tensor]:
        """Return copies of the averages, by name."""
        return {name: average.clone() for name, average in self.ema.named_averages()}
