"""Schedules of an attached loop: every kind, counting applied updates only.

accelerate alone tells the truth about skips in fp16 with an optimizer that is not fused, and rates
do not depend on precision or optimizer: that loop is what the others are compared with.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
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
from transformers.optimization import GreedyLR

from accelerate_loops import OPTIMIZERS, inverse, new_accelerator
from mfwrap.accelerate import attach
from small_networks import Classifier, labelled_batches
from spoilt_training import BadElement

NAN = float("nan")
UPDATES_PER_EPOCH = 4
NUM_EPOCHS = 3
NUM_UPDATES = UPDATES_PER_EPOCH * NUM_EPOCHS
METRICS = [3.0, 2.0, 2.0, 2.0, 2.5, 1.0, 1.5, 1.5, 1.5, 0.5, 0.6, 0.7]

# What torch says of a schedule that is stepped before the optimizer.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")


class Schedule(NamedTuple):
    """A schedule, and how a loop steps it."""

    make: Callable[[Optimizer], Any]
    when: str = "after"
    """``after`` or ``before`` the optimizer of each micro-batch, or after an ``epoch``."""

    arguments: Callable[[int], tuple] = lambda _: ()
    """What ``step`` is given, of the number of the update."""


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
    "GreedyLR": Schedule(
        functools.partial(GreedyLR, patience=1, factor=0.5, min_lr=1e-4), arguments=_metric
    ),
}


class Run(NamedTuple):
    """What a schedule has done."""

    rates: list[float]
    """That the optimizer used, one an update."""

    betas: list[Any]
    """Some schedules move them, too; momentum of an optimizer that has no betas."""

    state: dict[str, Any]
    """Of the schedule, at the end."""

    weights: list[torch.Tensor]


class _Training:
    """The loop of accelerate's documentation with one schedule."""

    def __init__(
        self,
        name: str,
        optimizer: str = "fused SGD",
        precision: str = "no",
        *,
        attached: bool = True,
        **settings: Any,
    ) -> None:
        self.accelerator = new_accelerator(precision, scale=2.0**10, **settings)
        self.step = attach(self.accelerator) if attached else None
        self.how = SCHEDULES[name]
        torch.manual_seed(0)
        network = Classifier()
        self.bad_element = BadElement(network.layers[0].weight, NAN)
        inner = OPTIMIZERS[optimizer](network.parameters())
        accumulation = self.accelerator.gradient_accumulation_steps
        # The last window of an epoch is shorter than the others.
        batches = labelled_batches(UPDATES_PER_EPOCH * accumulation - (accumulation > 1))
        dataset = TensorDataset(*(torch.cat(column) for column in zip(*batches, strict=True)))
        schedule = self.how.make(inner)
        self.network, self.optimizer, self.loader = self.accelerator.prepare(
            network, inner, DataLoader(dataset, batch_size=8)
        )
        # Not `prepare`, which leaves a GreedyLR alone.
        self.schedule = self.accelerator.prepare_scheduler(schedule)
        self.rates, self.betas = [], []

    def step_schedule(self) -> None:
        """Step the schedule where the loop does."""
        update = min(len(self.rates), NUM_UPDATES - 1)
        self.schedule.step(*self.how.arguments(update))

    def epoch(self, bad_updates: tuple[int, ...] = (), *, num_updates: int = 2**31) -> None:
        """Train for an epoch, or for as many updates of it."""
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
    """Train with one schedule for some epochs."""
    training = _Training(*arguments, **settings)
    for _ in range(NUM_EPOCHS):
        training.epoch(bad_updates)
    weights = [weight.detach().clone() for weight in training.network.parameters()]
    return Run(training.rates, training.betas, _plain(training.schedule.state_dict()), weights)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state that can be compared: some schedules keep schedules, or a function."""
    return {
        name: [_plain(each) for each in value] if name == "_schedulers" else value
        for name, value in state.items()
        if not callable(value) and name != "optimizer" and "anneal_func" not in name
    }


@functools.cache
def truthful(name: str, bad_updates: tuple[int, ...], accumulation: int) -> Run:
    """Return what accelerate alone does where it notices skips."""
    return run(
        name,
        "SGD",
        "fp16",
        attached=False,
        bad_updates=bad_updates,
        gradient_accumulation_steps=accumulation,
    )


each_schedule = pytest.mark.parametrize("name", SCHEDULES)
each_accumulation = pytest.mark.parametrize("accumulation", [1, 2])


@pytest.mark.parametrize(
    ("optimizer", "precision", "accumulation"),
    [("fused SGD", "no", 1), ("fused SGD", "fp16", 2), ("SGD", "bf16", 2)],
    ids=["fused", "fused, fp16, accumulated", "not fused, bf16, accumulated"],
)
@pytest.mark.parametrize("bad_updates", [(), (0,), (2, 3), (7, 8, 9), (11,)], ids=str)
@each_schedule
def test_rates_are_those_of_accelerate_where_it_knows_of_skips(
    name, bad_updates, optimizer, precision, accumulation
):
    """Every rate, the momentum that some schedules move, and the schedule's state at the end.

    Updates 3 and 7 are the last of their epochs, 11 is the last of all.
    """
    expected = truthful(name, bad_updates, accumulation)

    actual = run(
        name,
        optimizer,
        precision,
        bad_updates=bad_updates,
        gradient_accumulation_steps=accumulation,
    )

    assert actual.rates == expected.rates
    assert actual.betas == expected.betas
    assert actual.state == expected.state


@each_accumulation
@pytest.mark.parametrize("optimizer", ["fused AdamW", "foreach AdamW"])
@each_schedule
def test_weights_are_those_of_accelerate(name, optimizer, accumulation):
    """Late or not, each update uses the rate and the betas of accelerate's."""
    settings = {"gradient_accumulation_steps": accumulation}
    expected = run(name, optimizer, attached=False, **settings)

    actual = run(name, optimizer, **settings)

    assert (actual.rates, actual.betas) == (expected.rates, expected.betas)
    assert actual.state == expected.state
    torch.testing.assert_close(actual.weights, expected.weights, rtol=0, atol=0)


@each_accumulation
@pytest.mark.parametrize("bad_updates", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("name", [name for name in SCHEDULES if "OneCycleLR" not in name])
def test_a_schedule_apart_from_the_optimizer_is_stepped_at_once(name, bad_updates, accumulation):
    """With ``step_scheduler_with_optimizer=False`` every call is a step, as it is alone."""
    settings = {
        "gradient_accumulation_steps": accumulation,
        "step_scheduler_with_optimizer": False,
        "bad_updates": bad_updates,
    }
    expected = run(name, "SGD", "fp16", attached=False, **settings)

    actual = run(name, **settings)

    assert (actual.rates, actual.betas) == (expected.rates, expected.betas)
    assert actual.state == expected.state


@pytest.mark.parametrize("num_updates", [1, 3, 4])
@each_schedule
def test_a_state_right_after_a_skip_is_that_of_the_updates_before(name, num_updates):
    """Who asks for the schedule's state gets the truth of the very last update."""
    bad_updates = (num_updates - 1,)
    expected = _Training(name, "SGD", "fp16", attached=False)
    expected.epoch(bad_updates, num_updates=num_updates)
    expected_state = _plain(expected.schedule.state_dict())

    actual = _Training(name)
    actual.epoch(bad_updates, num_updates=num_updates)

    assert _plain(actual.schedule.state_dict()) == expected_state


@pytest.mark.parametrize("bad_updates", [(), (1,)], ids=["applied", "skipped"])
def test_the_last_rate_is_told_without_waiting(bad_updates):
    """It is the one last used; what the schedule makes of the last update comes with a flush."""
    training = _Training("LambdaLR")
    training.epoch(bad_updates, num_updates=2)
    first = OPTIMIZERS["fused SGD"]([torch.zeros(1)]).param_groups[0]["lr"]

    before = training.schedule.get_last_lr()
    training.step.flush()

    assert before == [training.rates[-1]] == [first / 2]
    assert training.schedule.get_last_lr() == [first / 2 if bad_updates else first * (1 / 3)]


def saved_states(training: _Training) -> dict[str, Any]:
    """Return copies of the states that a loop saves by itself, in its order."""
    # Copies, because states hold the schedules' own lists.
    return {
        "optimizer": copy.deepcopy(training.optimizer.state_dict()),
        "schedule": copy.deepcopy(training.schedule.state_dict()),
    }


@pytest.mark.parametrize("is_bad", [False, True], ids=["applied", "skipped"])
@each_schedule
def test_states_that_a_loop_saves_by_itself_go_on_as_accelerates_do(name, is_bad):
    """Loaded where training has gone on meanwhile, they bring the rates of accelerate's.

    The rate is in the optimizer's state, which is usually asked for before the schedule's.
    """
    rates = []
    for settings in ({"optimizer": "SGD", "precision": "fp16", "attached": False}, {}):
        saved = _Training(name, **settings)
        saved.epoch((1,) if is_bad else (), num_updates=2)
        states = saved_states(saved)
        training = _Training(name, **settings)
        training.epoch()
        training.optimizer.load_state_dict(states["optimizer"])
        training.schedule.load_state_dict(states["schedule"])
        training.epoch()
        rates.append(training.rates)

    assert rates[1] == rates[0]


def test_accelerate_alone_moves_a_schedule_over_a_skip_that_it_does_not_see():
    """What the step is for: with a fused optimizer in fp16 the rate falls for nothing."""
    blind = run("LambdaLR", "fused SGD", "fp16", attached=False, bad_updates=(2,))
    seeing = run("LambdaLR", "fused SGD", "fp16", bad_updates=(2,))

    assert blind.rates[3] < blind.rates[2]
    assert seeing.rates[3] == seeing.rates[2] == blind.rates[2]
    assert seeing.rates[4:] == blind.rates[3:-1]
