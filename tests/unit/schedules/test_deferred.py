"""A deferred schedule applies each step one update later, when the outcome is known."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    CosineAnnealingWarmRestarts,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)
from transformers.optimization import GreedyLR

from mfwrap.schedules.deferred import (
    DeferredSchedule,
    defer_schedule,
    is_stepped_with_a_metric,
    undefer_schedule,
)

SCHEDULES = {
    "LambdaLR": lambda optimizer: LambdaLR(optimizer, lambda step: 1 / (1 + step)),
    "StepLR": lambda optimizer: StepLR(optimizer, 2),
    "warm restarts": lambda optimizer: CosineAnnealingWarmRestarts(optimizer, 3),
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, 1.0, total_steps=12),
    "one after the other": lambda optimizer: SequentialLR(
        optimizer, [StepLR(optimizer, 1), StepLR(optimizer, 2)], milestones=[2]
    ),
}
each_schedule = pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES)


class Training:
    """An optimizer with its schedule, and a flag for a skipped update.

    Args:
        make: Function that builds the schedule for an optimizer.
        deferred: Whether the schedule's steps are deferred.
    """

    def __init__(self, make, *, deferred: bool = True) -> None:
        self.optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.5)
        self.schedule = make(self.optimizer)
        self.skipped = False
        self.num_flushes = 0
        if deferred:
            defer_schedule(self.schedule, lambda: self.skipped, self.flush)

    def flush(self) -> None:
        """Resolve the schedule and count the call."""
        self.num_flushes += 1
        self.schedule.resolve()

    def update(self, *, skipped: bool = False) -> float:
        """Run an update as the Trainer does, and return the rate that the optimizer used."""
        if isinstance(self.schedule, DeferredSchedule):
            self.schedule.resolve()
        self.optimizer.step()
        rate = self.optimizer.param_groups[0]["lr"]
        self.skipped = skipped
        self.schedule.step()
        return rate


@each_schedule
def test_rates_are_those_of_the_schedule_itself(make):
    """A deferred schedule gives each update the same rate as the plain schedule."""
    plain, deferred = Training(make, deferred=False), Training(make)

    for _ in range(8):
        assert deferred.update() == plain.update()


@each_schedule
def test_a_skipped_update_is_not_counted(make):
    """The update after a skipped update uses the same rate again."""
    plain, deferred = Training(make, deferred=False), Training(make)
    expected = [plain.update() for _ in range(4)]

    rates = [deferred.update(skipped=number in {1, 2, 5}) for number in range(7)]
    assert rates == [expected[number] for number in (0, 1, 1, 1, 2, 3, 3)]


@each_schedule
def test_the_state_is_that_after_the_last_update(make):
    """`state_dict` resolves the pending step and has the same keys as the plain schedule's."""
    plain, deferred = Training(make, deferred=False), Training(make)
    for _ in range(3):
        plain.update()
        deferred.update()

    state = deferred.schedule.state_dict()

    assert deferred.num_flushes == 1
    assert state.keys() == plain.schedule.state_dict().keys()
    assert state["last_epoch"] == plain.schedule.last_epoch == 3
    assert state["_last_lr"] == plain.schedule.get_last_lr()


@each_schedule
def test_a_loaded_schedule_goes_on(make):
    """A loaded schedule drops its pending step and continues from the loaded state."""
    first, second, plain = Training(make), Training(make), Training(make, deferred=False)
    for _ in range(3):
        first.update()
        plain.update()
    second.update()
    second.schedule.load_state_dict(copy.deepcopy(first.schedule.state_dict()))
    second.optimizer.load_state_dict(first.optimizer.state_dict())

    assert second.schedule.last_epoch == 3
    assert [second.update() for _ in range(3)] == [plain.update() for _ in range(3)]


def test_the_last_rate_is_the_one_that_was_used():
    """``get_last_lr`` returns the rate of the last update, and leaves the step pending."""
    training = Training(SCHEDULES["LambdaLR"])
    training.update()

    assert training.schedule.get_last_lr() == [0.5]
    assert training.num_flushes == 0
    training.flush()
    assert training.schedule.get_last_lr() == [0.25]


def test_a_rate_that_the_loop_sets_is_kept():
    """A rate that the loop sets between a step and its flush wins, as without deferral.

    torch's `StepLR` computes each rate from the present one. So the postponed step must start from
    the rate at the time of the request, and must not overwrite the loop's rate afterwards.
    """
    rates, computed = {}, {}
    for deferred in (False, True):
        training = Training(SCHEDULES["StepLR"], deferred=deferred)
        rates[deferred] = [training.update()]
        training.optimizer.param_groups[0]["lr"] = 0.3
        if deferred:
            training.flush()
        computed[deferred] = training.schedule.get_last_lr()
        rates[deferred] += [training.update() for _ in range(4)]

    assert rates[True] == rates[False]
    assert rates[True][:3] == [0.5, 0.3, pytest.approx(0.03)]
    assert computed[True] == computed[False] == [0.5]


def test_a_rate_that_the_loop_sets_after_a_skip_is_kept():
    """A rate that the loop sets stays if the postponed step is dropped for a skipped update."""
    training = Training(SCHEDULES["StepLR"])
    training.update(skipped=True)
    training.optimizer.param_groups[0]["lr"] = 0.3

    assert training.update() == 0.3


def test_arguments_of_a_step_arrive():
    """A deferred ``step(epoch)`` passes its argument to the schedule."""
    training = Training(SCHEDULES["warm restarts"])
    training.schedule.step(2)
    training.schedule.step(epoch=1)
    training.flush()

    assert training.schedule.last_epoch == 1


@each_schedule
def test_a_deferred_schedule_is_still_of_its_class(make):
    """Deferring keeps the schedule object; its class becomes a subclass with the same name."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    schedule = make(optimizer)
    kind = type(schedule)

    assert defer_schedule(schedule, lambda: False, lambda: None) is schedule
    assert isinstance(schedule, kind)
    assert isinstance(schedule, DeferredSchedule)
    assert (type(schedule).__name__, type(schedule).__module__) == (kind.__name__, kind.__module__)


@each_schedule
def test_undefer_gives_the_schedule_back(make):
    """`undefer_schedule` restores the plain schedule and drops the pending step."""
    plain, training = Training(make, deferred=False), Training(make)
    training.schedule.step()
    undefer_schedule(training.schedule)

    assert type(training.schedule) is type(plain.schedule)
    assert training.schedule.state_dict().keys() == plain.schedule.state_dict().keys()
    assert [training.update() for _ in range(5)] == [plain.update() for _ in range(5)]


def test_schedules_of_a_metric_are_told():
    """`is_stepped_with_a_metric` is true for schedules whose step takes a metric."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.5)

    assert is_stepped_with_a_metric(ReduceLROnPlateau(optimizer))
    assert is_stepped_with_a_metric(GreedyLR(optimizer))
    assert not is_stepped_with_a_metric(StepLR(optimizer, 2))
