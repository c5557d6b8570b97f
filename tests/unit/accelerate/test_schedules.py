"""Schedules of every kind count only applied updates in an attached loop.

accelerate alone reports skips correctly only in fp16 with an optimizer that is not fused. Rates do
not depend on precision or optimizer, so that loop is the reference for all others.
"""

import contextlib
import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.optim import SGD
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau

from mfwrap.accelerate import attach
from support.accelerate_loops import OPTIMIZERS, new_accelerator
from support.deferral import late_results
from support.scheduled_training import SCHEDULES, ScheduledTraining, plain_state, run, truthful
from support.small_networks import labelled_batches

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
