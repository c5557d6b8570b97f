"""Train accelerate loops with many schedules.

A loop steps its schedule before or after the optimizer, or at the end of each epoch.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CyclicLR,
    ExponentialLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from torch.utils.data import DataLoader, TensorDataset
from transformers import get_cosine_schedule_with_warmup

from mfwrap.accelerate import attach
from mfwrap.compatibility.foreign import is_installed
from support.accelerate_loops import OPTIMIZERS, inverse, new_accelerator
from support.small_networks import Classifier, labelled_batches
from support.spoilt.training import BadElement

__all__ = ["SCHEDULES", "ScheduledTraining", "plain_state", "run", "truthful"]

NAN = float("nan")
UPDATES_PER_EPOCH = 4
NUM_EPOCHS = 3
NUM_UPDATES = UPDATES_PER_EPOCH * NUM_EPOCHS
METRICS = [3.0, 2.0, 2.0, 2.0, 2.5, 1.0, 1.5, 1.5, 1.5, 0.5, 0.6, 0.7]


class Schedule(NamedTuple):
    """A schedule, and how a loop steps it."""

    make: Callable[[Optimizer], Any]
    """Function from the optimizer to its schedule."""

    when: str = "after"
    """When the loop steps the schedule.

    ``"after"`` or ``"before"`` the optimizer in each micro-batch, or after each ``"epoch"``.
    """

    arguments: Callable[[int], tuple] = lambda _: ()
    """Function from the index of the update to the arguments of the schedule's ``step``."""


def _epoch(update: int) -> tuple[float]:
    return (update / UPDATES_PER_EPOCH,)


def _metric(update: int) -> tuple[float]:
    return (METRICS[update],)


def _sequential(optimizer: Optimizer) -> SequentialLR:
    parts = [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, NUM_UPDATES)]
    return SequentialLR(optimizer, parts, milestones=[4])


def _chained(optimizer: Optimizer) -> ChainedScheduler:
    return ChainedScheduler(
        [ConstantLR(optimizer, 0.1, total_iters=3), ExponentialLR(optimizer, 0.9)]
    )


def _one_cycle(total_steps: int) -> Callable[[Optimizer], OneCycleLR]:
    return lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=total_steps)


def _plateau(optimizer: Optimizer) -> ReduceLROnPlateau:
    return ReduceLROnPlateau(optimizer, factor=0.5, patience=1)


def _restarts(optimizer: Optimizer) -> CosineAnnealingWarmRestarts:
    return CosineAnnealingWarmRestarts(optimizer, T_0=2, T_mult=2)


def _warmup(optimizer: Optimizer) -> LambdaLR:
    return get_cosine_schedule_with_warmup(optimizer, 3, NUM_UPDATES)


SCHEDULES = {
    "LambdaLR": Schedule(functools.partial(LambdaLR, lr_lambda=inverse)),
    "LambdaLR before the optimizer": Schedule(
        functools.partial(LambdaLR, lr_lambda=inverse), "before"
    ),
    "warm-up": Schedule(_warmup),
    "StepLR per epoch": Schedule(functools.partial(StepLR, step_size=1), "epoch"),
    "restarts": Schedule(_restarts),
    "restarts by epoch": Schedule(_restarts, arguments=_epoch),
    "restarts by epoch, before the optimizer": Schedule(_restarts, "before", _epoch),
    "restarts per epoch": Schedule(_restarts, "epoch"),
    "OneCycleLR": Schedule(_one_cycle(NUM_UPDATES + 1)),
    "OneCycleLR that is too long": Schedule(_one_cycle(2 * NUM_UPDATES)),
    "OneCycleLR that is too short": Schedule(_one_cycle(9)),
    "CyclicLR": Schedule(functools.partial(CyclicLR, base_lr=0.01, max_lr=0.1, step_size_up=3)),
    "SequentialLR": Schedule(_sequential),
    "ChainedScheduler": Schedule(_chained),
    "ReduceLROnPlateau": Schedule(_plateau, arguments=_metric),
    "ReduceLROnPlateau per epoch": Schedule(_plateau, "epoch", _metric),
}
if is_installed("transformers", "5.5"):
    from transformers.optimization import GreedyLR

    SCHEDULES["GreedyLR"] = Schedule(
        functools.partial(GreedyLR, patience=1, factor=0.5, min_lr=1e-4), arguments=_metric
    )


class Run(NamedTuple):
    """The results of a training with a schedule."""

    rates: list[float]
    """Learning rates that the optimizer used, one per update."""

    betas: list[Any]
    """Betas that the optimizer used, or its momentum if it has no betas, one per update.

    Some schedules change them.
    """

    state: dict[str, Any]
    """State of the schedule after the last update."""

    seen: list[list[float]]
    """Rates that ``get_last_lr`` returned right after each step of the schedule."""

    weights: list[torch.Tensor]
    """Weights after the last update."""


class ScheduledTraining:
    """Train in the loop of accelerate's documentation with one of the schedules.

    Args:
        name: Name of the schedule in `SCHEDULES`.
        optimizer: Name of the optimizer in `OPTIMIZERS`.
        precision: accelerate's ``mixed_precision``.
        attached: Whether to attach mfwrap's step to the accelerator.
        asks: Whether to call ``get_last_lr`` after each step of the schedule.
        settings: Further keyword arguments of the accelerator.
    """

    def __init__(
        self,
        name: str,
        optimizer: str = "fused SGD",
        precision: str = "no",
        *,
        attached: bool = True,
        asks: bool = True,
        **settings: Any,
    ) -> None:
        self._asks = asks
        self.accelerator = new_accelerator(precision, scale=2.0**10, **settings)
        self.step = attach(self.accelerator) if attached else None
        self.how = SCHEDULES[name]
        torch.manual_seed(0)
        network = Classifier()
        self.bad_element = BadElement(network.layers[0].weight, NAN)
        inner = OPTIMIZERS[optimizer](network.parameters())
        accumulation = self.accelerator.gradient_accumulation_steps
        # With accumulation, the last update of an epoch has one micro-batch fewer than the others.
        batches = labelled_batches(UPDATES_PER_EPOCH * accumulation - (accumulation > 1))
        dataset = TensorDataset(*(torch.cat(column) for column in zip(*batches, strict=True)))
        schedule = self.how.make(inner)
        self.network, self.optimizer, self.loader = self.accelerator.prepare(
            network, inner, DataLoader(dataset, batch_size=8)
        )
        # Prepare the schedule separately: `prepare` does not recognize a GreedyLR as a schedule.
        self.schedule = self.accelerator.prepare_scheduler(schedule)
        self.rates, self.betas, self.seen = [], [], []

    def step_schedule(self) -> None:
        """Step the schedule with its arguments for the current update."""
        update = min(len(self.rates), NUM_UPDATES - 1)
        self.schedule.step(*self.how.arguments(update))
        if self._asks:
            self.seen.append(self.schedule.get_last_lr())

    def epoch(self, bad_updates: tuple[int, ...] = (), *, num_updates: int = 2**31) -> None:
        """Train for an epoch, or until `num_updates` updates have been made in total."""
        for inputs, labels in self.loader:
            with self.accelerator.accumulate(self.network):
                self.bad_element.active = len(self.rates) in bad_updates
                self.accelerator.backward(self.network(inputs, labels))
                if self.how.when == "before":
                    self.step_schedule()
                self.optimizer.step()
                group = self.optimizer.param_groups[0]
                rate, betas = group["lr"], group.get("betas", group.get("momentum"))
                if self.how.when == "after":
                    self.step_schedule()
                self.optimizer.zero_grad()
            if self.accelerator.sync_gradients:
                self.rates.append(rate)
                self.betas.append(betas)
                if len(self.rates) == num_updates:
                    return
        if self.how.when == "epoch":
            self.step_schedule()


def run(*arguments: Any, bad_updates: tuple[int, ...] = (), **settings: Any) -> Run:
    """Train for `NUM_EPOCHS` epochs; arguments as in `ScheduledTraining`."""
    training = ScheduledTraining(*arguments, **settings)
    for _ in range(NUM_EPOCHS):
        training.epoch(bad_updates)
    weights = [weight.detach().clone() for weight in training.network.parameters()]
    state = plain_state(training.schedule.state_dict())
    return Run(training.rates, training.betas, state, training.seen, weights)


def plain_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return a schedule's state in a form that can be compared.

    Functions and the optimizer are left out, and inner schedules are replaced by their states.
    """
    return {
        name: [plain_state(each) for each in value] if name == "_schedulers" else value
        for name, value in state.items()
        if not callable(value) and name != "optimizer" and "anneal_func" not in name
    }


@functools.cache
def truthful(name: str, bad_updates: tuple[int, ...], accumulation: int) -> Run:
    """Return the run of plain accelerate in fp16; only in fp16 does accelerate detect skips."""
    return run(
        name,
        "SGD",
        "fp16",
        attached=False,
        bad_updates=bad_updates,
        gradient_accumulation_steps=accumulation,
    )
