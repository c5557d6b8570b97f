"""Schedules of every kind count only applied updates in an attached loop.

accelerate alone reports skips correctly only in fp16 with an optimizer that is not fused. Rates do
not depend on precision or optimizer, so that loop is the reference for all others.
"""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from accelerate import Accelerator
from torch.optim import SGD, Optimizer
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
from support.deferral import late_results
from support.small_networks import Classifier, labelled_batches
from support.spoilt.training import BadElement

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


# Some of these loops step the schedule before the optimizer, and torch warns about this order.
pytestmark = pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")

EACH_WITH_EACH = [
    (name, optimizer)
    for name in SCHEDULES
    for optimizer in OPTIMIZERS
    # These schedules change the momentum, which Adafactor does not have.
    if optimizer != "Adafactor" or not name.startswith(("OneCycleLR", "CyclicLR"))
]

each_schedule = pytest.mark.parametrize("name", SCHEDULES)
each_accumulation = pytest.mark.parametrize("accumulation", [1, 2])


@pytest.fixture
def _arrival(request) -> Iterator[None]:
    """Run a test with results that arrive late (a device) or at once (a CPU)."""
    with late_results() if request.param else contextlib.nullcontext():
        yield


each_arrival = pytest.mark.parametrize(
    "_arrival", [True, False], ids=["late", "at once"], indirect=True
)


@pytest.mark.fast_sample(64)
@pytest.mark.usefixtures("_arrival")
@each_arrival
@pytest.mark.parametrize("asks", [True, False], ids=["asked", "not asked"])
@pytest.mark.parametrize(
    ("optimizer", "precision", "accumulation"),
    [("fused SGD", "no", 1), ("fused SGD", "fp16", 2), ("SGD", "bf16", 2)],
    ids=["fused", "fused, fp16, accumulated", "not fused, bf16, accumulated"],
)
@pytest.mark.parametrize("bad_updates", [(), (0,), (2, 3), (7, 8, 9), (11,)], ids=str)
@each_schedule
def test_rates_are_those_of_accelerate_where_it_knows_of_skips(
    name, bad_updates, optimizer, precision, accumulation, asks
):
    """Rates, momentum and final schedule state equal those of the reference loop.

    If the loop calls ``get_last_lr`` after each step of the schedule, the answers are equal, too.
    Updates 3 and 7 are the last of their epochs; update 11 is the last of the run.
    """
    expected = truthful(name, bad_updates, accumulation)

    actual = run(
        name,
        optimizer,
        precision,
        bad_updates=bad_updates,
        gradient_accumulation_steps=accumulation,
        asks=asks,
    )

    assert actual.rates == expected.rates
    assert actual.betas == expected.betas
    assert actual.state == expected.state
    assert actual.seen == (expected.seen if asks else [])


@pytest.mark.fast_sample(16)
@pytest.mark.usefixtures("_arrival")
@each_arrival
@each_accumulation
@pytest.mark.parametrize(("name", "optimizer"), EACH_WITH_EACH)
def test_weights_are_those_of_accelerate(name, optimizer, accumulation):
    """Without skips, rates, betas and weights are bitwise equal to those of accelerate alone."""
    settings = {"gradient_accumulation_steps": accumulation}
    expected = run(name, optimizer, attached=False, **settings)

    actual = run(name, optimizer, **settings)

    assert actual.seen == expected.seen
    assert (actual.rates, actual.betas) == (expected.rates, expected.betas)
    assert actual.state == expected.state
    torch.testing.assert_close(actual.weights, expected.weights, rtol=0, atol=0)


@pytest.mark.fast_sample(16)
@each_accumulation
@pytest.mark.parametrize("bad_updates", [(), (2, 3)], ids=str)
@pytest.mark.parametrize("name", [name for name in SCHEDULES if "OneCycleLR" not in name])
def test_a_schedule_apart_from_the_optimizer_is_stepped_at_once(name, bad_updates, accumulation):
    """With ``step_scheduler_with_optimizer=False`` every call steps the schedule immediately."""
    settings = {
        "gradient_accumulation_steps": accumulation,
        "step_scheduler_with_optimizer": False,
        "bad_updates": bad_updates,
    }
    expected = run(name, "SGD", "fp16", attached=False, **settings)

    actual = run(name, **settings)

    assert (actual.rates, actual.betas) == (expected.rates, expected.betas)
    assert actual.state == expected.state


@pytest.mark.fast_sample(12)
@pytest.mark.parametrize("num_updates", [1, 3, 4])
@each_schedule
def test_a_state_right_after_a_skip_is_that_of_the_updates_before(name, num_updates):
    """A schedule's state that is read right after a skip does not count the skipped update."""
    bad_updates = (num_updates - 1,)
    expected = ScheduledTraining(name, "SGD", "fp16", attached=False)
    expected.epoch(bad_updates, num_updates=num_updates)
    expected_state = plain_state(expected.schedule.state_dict())

    actual = ScheduledTraining(name)
    actual.epoch(bad_updates, num_updates=num_updates)

    assert plain_state(actual.schedule.state_dict()) == expected_state


@pytest.mark.parametrize("bad_updates", [(), (1,)], ids=["applied", "skipped"])
@each_schedule
def test_a_state_between_two_micro_batches_is_that_after_the_last_update(name, bad_updates):
    """A schedule's state that is read between micro-batches includes the last update."""
    states = []
    for settings in ({"optimizer": "SGD", "precision": "fp16", "attached": False}, {}):
        training = ScheduledTraining(name, gradient_accumulation_steps=2, **settings)
        training.epoch(bad_updates, num_updates=2)
        training.bad_element.active = False
        with training.accelerator.accumulate(training.network):
            training.accelerator.backward(training.network(*labelled_batches(1)[0]))
            assert not training.accelerator.sync_gradients
            states.append(plain_state(training.schedule.state_dict()))

    assert states[1] == states[0]


QUESTIONS = {
    "get_last_lr": lambda schedule: schedule.get_last_lr(),
    "last_epoch": lambda schedule: schedule.scheduler.last_epoch,
    "state_dict": lambda schedule: schedule.state_dict()["_last_lr"],
    "flush": lambda schedule: schedule.attachment.flush(),
}


@pytest.mark.usefixtures("_late_results")
@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
@pytest.mark.parametrize("bad_updates", [(), (1,)], ids=["applied", "skipped"])
def test_a_question_does_what_is_pending(bad_updates, ask):
    """The rate in the optimizer is the last used one until somebody asks the schedule."""
    training = ScheduledTraining("LambdaLR", asks=False)
    training.epoch(bad_updates, num_updates=2)
    group = training.optimizer.param_groups[0]
    first = OPTIMIZERS["fused SGD"]([torch.zeros(1)]).param_groups[0]["lr"]
    before = group["lr"]

    ask(training.schedule)

    assert before == training.rates[-1] == first / 2
    assert group["lr"] == (first / 2 if bad_updates else first * (1 / 3))


@pytest.mark.usefixtures("_late_results")
@pytest.mark.parametrize(("optimizer", "waits"), [("fused SGD", True), ("SGD", False)])
def test_an_optimizer_that_reads_the_flag_needs_no_second_wait(optimizer, waits):
    """If the optimizer has read the skip flag, the schedule advances at once on a device, too."""
    training = ScheduledTraining("LambdaLR", optimizer, asks=False)
    training.epoch(num_updates=1)

    rate = training.optimizer.param_groups[0]["lr"]
    assert rate == (training.rates[0] if waits else training.rates[0] / 2)


def saved_states(training: ScheduledTraining) -> dict[str, Any]:
    """Return copies of the optimizer's and the schedule's state, in the order of a manual save."""
    # Copy the states, because they refer to lists that the schedules change later.
    return {
        "optimizer": copy.deepcopy(training.optimizer.state_dict()),
        "schedule": copy.deepcopy(training.schedule.state_dict()),
    }


@pytest.mark.parametrize("is_bad", [False, True], ids=["applied", "skipped"])
@each_schedule
def test_states_that_a_loop_saves_by_itself_go_on_as_accelerates_do(name, is_bad):
    """A loop that saves and loads states by hand has the same rates as with accelerate alone.

    The optimizer's state, which holds the rate, is usually saved before the schedule's.
    """
    rates = []
    for settings in ({"optimizer": "SGD", "precision": "fp16", "attached": False}, {}):
        saved = ScheduledTraining(name, **settings)
        saved.epoch((1,) if is_bad else (), num_updates=2)
        states = saved_states(saved)
        training = ScheduledTraining(name, **settings)
        training.epoch()
        training.optimizer.load_state_dict(states["optimizer"])
        training.schedule.load_state_dict(states["schedule"])
        training.epoch()
        rates.append(training.rates)

    assert rates[1] == rates[0]


def test_accelerate_alone_moves_a_schedule_over_a_skip_that_it_does_not_see():
    """Accelerate alone steps a schedule if a fused optimizer skips in fp16; mfwrap does not."""
    blind = run("LambdaLR", "fused SGD", "fp16", attached=False, bad_updates=(2,))
    seeing = run("LambdaLR", "fused SGD", "fp16", bad_updates=(2,))

    assert blind.rates[3] < blind.rates[2]
    assert seeing.rates[3] == seeing.rates[2] == blind.rates[2]
    assert seeing.rates[4:] == blind.rates[3:-1]


def rates_of_two_schedules(second, *, asks: bool, attached: bool = True) -> list[float]:
    """Return the rates of three updates with two schedules of one optimizer."""
    accelerator = new_accelerator()
    if attached:
        attach(accelerator)
    network = torch.nn.Linear(2, 1)
    optimizer = SGD(network.parameters(), lr=1.0, fused=True)
    schedules = (ExponentialLR(optimizer, 0.5), second(optimizer))
    _, optimizer, *schedules = accelerator.prepare(network, optimizer, *schedules)
    rates = []
    for _ in range(4):
        accelerator.backward(network(torch.ones(1, 2)).sum())
        rates.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedules[0].step()
        if asks:
            assert not accelerator.optimizer_step_was_skipped
        schedules[1].step(*([1.0] if second is plateau else []))
        optimizer.zero_grad()
    if attached:
        accelerator.attachment.flush()
    return [*rates, optimizer.param_groups[0]["lr"]]


def plateau(optimizer):
    """Return a schedule that divides the rate by ten after each metric but the first."""
    return ReduceLROnPlateau(optimizer, factor=0.1, patience=0)


@pytest.mark.usefixtures("_arrival")
@each_arrival
@pytest.mark.parametrize("asks", [True, False], ids=["asked", "not asked"])
@pytest.mark.parametrize("second", [lambda optimizer: ExponentialLR(optimizer, 0.9), plateau])
def test_two_schedules_of_an_optimizer(second, asks):
    """Each schedule starts from the rates that the other one has set, as with accelerate alone."""
    expected = rates_of_two_schedules(second, asks=False, attached=False)

    assert len(set(expected)) == 5
    assert rates_of_two_schedules(second, asks=asks) == expected


def test_a_schedule_of_an_optimizer_that_another_accelerator_has_prepared():
    """The schedule advances as with accelerate alone, although its optimizer has no step."""
    accelerator, attached = Accelerator(cpu=True), Accelerator(cpu=True)
    network = torch.nn.Linear(2, 1)
    optimizer = SGD(network.parameters(), lr=1.0)
    optimizer, schedule = accelerator.prepare(optimizer, ExponentialLR(optimizer, 0.5))
    attach(attached)

    schedule = attached.prepare(schedule)
    optimizer.step()
    schedule.step()

    assert schedule.get_last_lr() == [0.5]
