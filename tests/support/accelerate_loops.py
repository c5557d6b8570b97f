"""Run the training loop of accelerate's documentation, plain or with mfwrap's step attached."""

import functools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor, nn
from torch.optim import SGD, Adafactor, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR
from torch.optim.swa_utils import get_ema_multi_avg_fn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from mfwrap import ExponentialMovingAverage, StepConfig
from mfwrap.accelerate import AttachedStep, attach
from support.small_networks import Classifier, labelled_batches
from support.spoilt.training import BadElement
from support.training_state import training_state

__all__ = [
    "DECAY",
    "OPTIMIZERS",
    "BytesRead",
    "Loop",
    "Trace",
    "inverse",
    "new_accelerator",
    "train",
    "train_alone",
    "weights_of",
]

DECAY = 0.9

OPTIMIZERS: dict[str, Callable[..., Optimizer]] = {
    "fused AdamW": lambda weights: AdamW(weights, lr=1e-2, weight_decay=0.1, fused=True),
    "foreach AdamW": lambda weights: AdamW(weights, lr=1e-2, weight_decay=0.1, foreach=True),
    "fused SGD": lambda weights: SGD(weights, lr=0.05, momentum=0.9, fused=True),
    "SGD": lambda weights: SGD(weights, lr=0.05, momentum=0.9, fused=False),
    # The default of Adafactor's first eps depends on the weights' dtype, so set both values of eps.
    "Adafactor": lambda weights: Adafactor(weights, lr=1e-2, eps=(1e-7, 1e-3)),
}


def new_accelerator(precision: str = "no", *, scale: float = 1.0, **settings: Any) -> Accelerator:
    """Return an accelerator on the CPU that shares no state with earlier accelerators.

    In fp16 it gets autocast and a gradient scaler, which accelerate creates on CUDA only.

    Args:
        precision: accelerate's ``mixed_precision``.
        scale: Initial scale of the fp16 gradient scaler.
        settings: Further keyword arguments of the accelerator.
    """
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(cpu=True, mixed_precision=precision, **settings)
    if precision == "fp16":
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    return accelerator


def inverse(step: int) -> float:
    """Return the learning rate's factor ``1 / (1 + step)``."""
    return 1 / (1 + step)


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The settings of a training loop."""

    optimizer: str = "fused AdamW"

    precision: str = "no"
    """accelerate's ``mixed_precision``."""

    scale: float = 1.0
    """Loss scale; plain accelerate scales the loss in fp16 only."""

    accumulation: int = 1
    """Number of micro-batches per update."""

    max_norm: float | None = None
    """Largest norm of the gradients; ``None`` means no clipping."""

    num_batches: int = 5
    """Total number of micro-batches."""

    bad_updates: tuple[int, ...] = ()
    """Indices of updates with a bad element in the gradient of their first micro-batch."""

    bad_value: float = math.nan
    """Value of the bad element."""

    left_out: tuple[int, ...] = ()
    """Indices of updates whose data is removed; the data of all other updates stays the same."""

    zero_grad_first: bool = False
    """Whether to zero gradients before the forward, as loops without accumulation often do."""


class Trace(NamedTuple):
    """The results of a training; lists have one item per update unless a field says otherwise."""

    losses: list[float]
    """Losses, one per micro-batch."""

    norms: list[Tensor]
    """Norms that ``clip_grad_norm_`` returned."""

    rates: list[float]
    """Learning rates that the optimizer used."""

    skipped: list[bool]
    """Values of ``optimizer_step_was_skipped``."""

    states: list[dict[str, Any]]
    """Weights and optimizer state: before the first update, then after each update."""

    averages: list[list[Tensor]]
    """Averages of the weights: before the first update, then after each update."""

    schedule: dict[str, Any]
    """State of the schedule after the last update."""

    reports: list[Any]
    """Reports of the attached step; ``None`` without it."""

    @property
    def weights(self) -> dict[str, Tensor]:
        """Weights after the last update, by name."""
        return weights_of(self.states[-1])


def weights_of(state: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights in a training state."""
    return {name: value for name, value in state.items() if name.startswith("/network/")}


@functools.cache
def train_alone(loop: Loop) -> Trace:
    """Return the trace of the loop with plain accelerate; it is cached, so do not modify it."""
    return train(loop, attached=False)


def train(
    loop: Loop,
    *,
    attached: bool,
    config: StepConfig | None = None,
    given_ema: bool = False,
    asks: bool = True,
) -> Trace:
    """Train a small network in an accelerate loop and return its trace.

    Args:
        loop: Settings of the loop.
        attached: Whether to attach mfwrap's step to the accelerator.
        config: Settings of the attached step.
        given_ema: If True, pass the step an average that was created from the network before
            ``prepare``. If False, pass a function with which the step creates the average.
        asks: Whether to read ``optimizer_step_was_skipped`` after each update. If False, the trace
            records all updates as not skipped.
    """
    accelerator = new_accelerator(
        loop.precision, scale=loop.scale, gradient_accumulation_steps=loop.accumulation
    )
    torch.manual_seed(0)
    network = Classifier()
    optimizer = OPTIMIZERS[loop.optimizer](network.parameters())
    step = None
    if attached:
        ema = _average(network) if given_ema else _average
        # In fp16, the step adopts the loss scale of accelerate's scaler.
        scale_sense = None if loop.precision == "fp16" else loop.scale
        step = attach(accelerator, config, ema, scale_sense=scale_sense)
    bad_element = BadElement(network.layers[0].weight, loop.bad_value)
    network, optimizer, schedule, loader = accelerator.prepare(
        network, optimizer, LambdaLR(optimizer, inverse), _loader(loop)
    )
    recorder = _Recorder(network, optimizer, step)
    for inputs, labels in loader:
        with accelerator.accumulate(network):
            if loop.zero_grad_first:
                optimizer.zero_grad()
            is_first = len(recorder.losses) % loop.accumulation == 0
            bad_element.active = is_first and recorder.num_updates in loop.bad_updates
            loss = network(inputs, labels)
            accelerator.backward(loss)
            recorder.losses.append(loss.item())
            if accelerator.sync_gradients and loop.max_norm is not None:
                norm = accelerator.clip_grad_norm_(network.parameters(), loop.max_norm)
                recorder.norms.append(norm)
            optimizer.step()
            rate = optimizer.param_groups[0]["lr"]
            schedule.step()
            if not loop.zero_grad_first:
                optimizer.zero_grad()
        if accelerator.sync_gradients:
            recorder.on_update(rate, skipped=asks and accelerator.optimizer_step_was_skipped)
    return recorder.trace(schedule.state_dict())


def _average(network: nn.Module) -> ExponentialMovingAverage:
    return ExponentialMovingAverage(network, DECAY)


def _loader(loop: Loop) -> DataLoader:
    batches = labelled_batches(loop.num_batches)
    kept = [b for i, b in enumerate(batches) if i // loop.accumulation not in loop.left_out]
    inputs, labels = (torch.cat(column) for column in zip(*kept, strict=True))
    return DataLoader(TensorDataset(inputs, labels), batch_size=8)


class _Recorder:
    """Collect the trace of a training.

    If no step is attached, the recorder averages the weights itself, with torch's function.
    """

    def __init__(self, network: nn.Module, optimizer: Any, step: AttachedStep | None) -> None:
        self.losses: list[float] = []
        self.norms: list[Tensor] = []
        self._network, self._optimizer, self._step = network, optimizer, step
        self._rates: list[float] = []
        self._skipped: list[bool] = []
        self._states = [self._state()]
        self._averages = [[p.detach().clone() for p in network.parameters()]]
        self._reports: list[Any] = []

    @property
    def num_updates(self) -> int:
        return len(self._rates)

    def on_update(self, rate: float, *, skipped: bool) -> None:
        self._rates.append(rate)
        self._skipped.append(skipped)
        self._states.append(self._state())
        self._averages.append(self._next_averages(skipped=skipped))
        self._reports.append(None if self._step is None else self._step.last_report)

    def _state(self) -> dict[str, Any]:
        state = training_state(self._network, self._optimizer.optimizer)
        # Leave out the parameter groups: a deferred schedule may set the learning rate only just
        # before the next update, so the groups of the two loops may differ here.
        return {name: v for name, v in state.items() if "/param_groups/" not in name}

    def _next_averages(self, *, skipped: bool) -> list[Tensor]:
        if self._step is not None:
            return [average.clone() for _, average in self._step.ema.named_averages()]
        averages = [average.clone() for average in self._averages[-1]]
        if not skipped:
            weights = [weight.detach() for weight in self._network.parameters()]
            get_ema_multi_avg_fn(DECAY)(averages, weights, 1)
        return averages

    def trace(self, schedule: dict[str, Any]) -> Trace:
        return Trace(
            self.losses,
            self.norms,
            self._rates,
            self._skipped,
            self._states,
            self._averages,
            schedule,
            self._reports,
        )


class BytesRead(TorchDispatchMode):
    """Count the bytes that operators read from the given tensors.

    If an operator gets the same tensor twice in one call, its bytes count once.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        super().__init__()
        self._memories = {tensor.untyped_storage().data_ptr() for tensor in tensors}
        self.num_bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view:
            taken = {
                (leaf.data_ptr(), leaf.numel() * leaf.element_size())
                for leaf in torch.utils._pytree.tree_leaves((args, kwargs))
                if isinstance(leaf, Tensor) and leaf.untyped_storage().data_ptr() in self._memories
            }
            self.num_bytes += sum(size for _, size in taken)
        return func(*args, **(kwargs or {}))
