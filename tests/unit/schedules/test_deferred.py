"""A deferred schedule does each step when the outcome of the last update is known."""

import copy

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    CosineAnnealingWarmRestarts,
    LambdaLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from mfwrap.schedules.deferred import (
    DeferredSchedule,
    defer_schedule,
    is_stepped_with_a_metric,
    undefer_schedule,
)
from support.versions import needs

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
        late: Whether only a device knows the outcome of an update, until somebody asks for it.
    """

    def __init__(self, make, *, deferred: bool = True, late: bool = True) -> None:
        self.optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.5)
        self.schedule = make(self.optimizer)
        self.late = late
        self.is_known = True
        self.skipped = False
        self.num_waits = 0
        if deferred:
            defer_schedule(self.schedule, lambda: self.is_known, self.was_skipped)

    def was_skipped(self) -> bool:
        """Return whether the last update was skipped; count the calls that must wait for it."""
        self.num_waits += not self.is_known
        self.is_known = True
        return self.skipped

    def update(self, *, skipped: bool = False) -> float:
        """Run an update as the Trainer does, and return the rate that the optimizer used."""
        if isinstance(self.schedule, DeferredSchedule):
            self.schedule.resolve()
        self.optimizer.step()
        rate = self.optimizer.param_groups[0]["lr"]
        self.skipped, self.is_known = skipped, not self.late
        self.schedule.step()
        return rate


each_arrival = pytest.mark.parametrize("late", [True, False], ids=["late", "at once"])


@each_arrival
@each_schedule
def test_rates_are_those_of_the_schedule_itself(make, late):
    """A deferred schedule gives each update the same rate as the plain schedule."""
    plain, deferred = Training(make, deferred=False), Training(make, late=late)

    for _ in range(8):
        assert deferred.update() == plain.update()


@each_arrival
@each_schedule
def test_a_skipped_update_is_not_counted(make, late):
    """The update after a skipped update uses the same rate again."""
    plain, deferred = Training(make, deferred=False), Training(make, late=late)
    expected = [plain.update() for _ in range(4)]

    rates = [deferred.update(skipped=number in {1, 2, 5}) for number in range(7)]
    assert rates == [expected[number] for number in (0, 1, 1, 1, 2, 3, 3)]


QUESTIONS = {
    "get_last_lr": lambda schedule: schedule.get_last_lr(),
    "last_epoch": lambda schedule: schedule.last_epoch,
    "state_dict": lambda schedule: schedule.state_dict()["_last_lr"],
}


@pytest.mark.parametrize("ask", QUESTIONS.values(), ids=QUESTIONS)
@each_schedule
def test_who_asks_pays_one_wait_and_gets_the_truth(make, ask):
    """A question after each step is answered as by the plain schedule, and waits once."""
    plain, deferred = Training(make, deferred=False), Training(make)

    for number in range(1, 6):
        plain.update()
        deferred.update()
        assert ask(deferred.schedule) == ask(plain.schedule)
        assert ask(deferred.schedule) == ask(plain.schedule)
        assert deferred.num_waits == number
        rates = [group["lr"] for group in deferred.optimizer.param_groups]
        assert rates == [group["lr"] for group in plain.optimizer.param_groups]


@pytest.mark.filterwarnings("ignore:Detected call of .lr_scheduler.step")
@each_schedule
def test_steps_without_an_update_are_done_at_once(make):
    """Bare steps before the first update change the rate at once and never wait."""
    plain, deferred = Training(make, deferred=False), Training(make)

    for _ in range(5):
        plain.schedule.step()
        deferred.schedule.step()
        assert deferred.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"]
    assert deferred.num_waits == 0


def test_a_step_at_once_comes_after_the_steps_that_wait():
    """If the outcome becomes known in between, earlier requested steps are done first."""
    plain, deferred = Training(SCHEDULES["StepLR"], deferred=False), Training(SCHEDULES["StepLR"])
    plain.update()
    deferred.update()
    deferred.was_skipped()
    for training in (plain, deferred):
        training.schedule.step()

    assert deferred.optimizer.param_groups[0]["lr"] == plain.optimizer.param_groups[0]["lr"] == 0.05
    assert deferred.schedule.last_epoch == 2


@each_schedule
def test_the_state_is_that_after_the_last_update(make):
    """`state_dict` resolves the pending step and has the same keys as the plain schedule's."""
    plain, deferred = Training(make, deferred=False), Training(make)
    for _ in range(3):
        plain.update()
        deferred.update()

    state = deferred.schedule.state_dict()

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


def test_a_position_that_the_class_computes_is_kept():
    """A schedule whose class defines ``last_epoch``, or lacks it, behaves as without deferral."""

    class Computed(LambdaLR):
        @property
        def last_epoch(self) -> int:
            return self._step_count - 1

        @last_epoch.setter
        def last_epoch(self, _: int) -> None:
            pass

    def computed(optimizer):
        return Computed(optimizer, lambda step: 1 / (1 + step))

    plain, training = Training(computed, deferred=False), Training(computed)
    plain.update()
    training.update()
    chained = Training(lambda optimizer: ChainedScheduler([StepLR(optimizer, 1)]))

    assert training.schedule.get_last_lr() == plain.schedule.get_last_lr()
    assert training.schedule.last_epoch == plain.schedule.last_epoch
    assert not hasattr(chained.schedule, "last_epoch")


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
    training.is_known = False
    training.schedule.step(2)
    training.schedule.step(epoch=1)

    assert training.schedule.last_epoch == 1


@each_schedule
def test_a_deferred_schedule_is_still_of_its_class(make):
    """Deferring keeps the schedule object; its class becomes a subclass with the same name."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.5)
    schedule = make(optimizer)
    kind = type(schedule)

    assert defer_schedule(schedule, lambda: True, lambda: False) is schedule
    assert isinstance(schedule, kind)
    assert isinstance(schedule, DeferredSchedule)
    assert (type(schedule).__name__, type(schedule).__module__) == (kind.__name__, kind.__module__)


@each_schedule
def test_undefer_gives_the_schedule_back(make):
    """`undefer_schedule` restores the plain schedule and drops the pending step."""
    plain, training = Training(make, deferred=False), Training(make)
    training.is_known = False
    training.schedule.step()
    undefer_schedule(training.schedule)

    assert type(training.schedule) is type(plain.schedule)
    assert training.schedule.state_dict().keys() == plain.schedule.state_dict().keys()
    assert [training.update() for _ in range(5)] == [plain.update() for _ in range(5)]


@each_schedule
def test_a_copy_is_the_plain_schedule_with_nothing_pending(make):
    """A deep copy is of the user's class, has done the pending step, and goes on by itself."""
    plain, training = Training(make, deferred=False), Training(make)
    plain.update()
    training.update()

    copied = copy.deepcopy(training.schedule)
    copied.optimizer.step()
    copied.step()
    plain.update()

    assert type(copied) is type(plain.schedule)
    assert copied.get_last_lr() == plain.schedule.get_last_lr()
    assert copied.state_dict().keys() == plain.schedule.state_dict().keys()


def test_schedules_of_a_metric_are_told():
    """`is_stepped_with_a_metric` is true for schedules whose step takes a metric."""
    optimizer = SGD([nn.Parameter(torch.ones(1))], lr=0.5)

    assert is_stepped_with_a_metric(ReduceLROnPlateau(optimizer))
    assert not is_stepped_with_a_metric(StepLR(optimizer, 2))


@needs("transformers", "5.5", "GreedyLR")
def test_a_schedule_of_transformers_is_told():
    """`is_stepped_with_a_metric` knows transformers' own schedule of a metric."""
    from transformers.optimization import GreedyLR  # noqa: PLC0415  (not in every version)

    assert is_stepped_with_a_metric(GreedyLR(SGD([nn.Parameter(torch.ones(1))], lr=0.5)))
