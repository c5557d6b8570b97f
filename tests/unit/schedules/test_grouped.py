"""`GroupedLR` gives each parameter group the rates of its own schedule."""

import copy
import functools
import pickle

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR

from mfwrap import MFTrainOneStepCell, WithLossCell
from mfwrap.schedules import (
    ConstantWarmUpLR,
    CosineWithWarmUpLR,
    GroupedLR,
    LinearWithWarmUpLR,
)

COSINE = functools.partial(CosineWithWarmUpLR, total_steps=8, warmup_steps=2, lr_end=0.01)
LINEAR = functools.partial(LinearWithWarmUpLR, total_steps=6, warmup_ratio=0.5)
CONSTANT = functools.partial(ConstantWarmUpLR, warmup_steps=3)
SCHEDULES = [COSINE, LINEAR, CONSTANT]
RATES = [1.0, 0.5, 0.25]


def optimizer_with(rates):
    """Return an optimizer with a parameter group for each rate."""
    return SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": rate} for rate in rates])


def rates_of(schedule, optimizer, num_steps):
    """Return the rates of all groups at each step."""
    rates = []
    for _ in range(num_steps):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    return rates


def test_each_group_has_the_rates_of_its_schedule():
    """The rates of a group are those of an optimizer that has only this group and its schedule."""
    optimizer = optimizer_with(RATES)
    together = rates_of(GroupedLR(optimizer, SCHEDULES), optimizer, 10)
    for index, (make, rate) in enumerate(zip(SCHEDULES, RATES, strict=True)):
        alone = optimizer_with([rate])
        assert [[each[index]] for each in together] == rates_of(make(alone), alone, 10)


@pytest.mark.parametrize("way", ["saved", "pickled", "deep copy", "last_epoch"])
def test_it_continues(way):
    """After a resume, or in a copy, the rates go on, and the saved state holds only numbers."""
    optimizer = optimizer_with(RATES)
    schedule = GroupedLR(optimizer, SCHEDULES)
    rates_of(schedule, optimizer, 3)
    other = optimizer_with(RATES)
    if way == "saved":
        resumed = GroupedLR(other, SCHEDULES)
        state = schedule.state_dict()
        assert all(type(value) in {int, float, bool, list} for value in state.values())
        resumed.load_state_dict(state)
        other.load_state_dict(optimizer.state_dict())
    elif way == "last_epoch":
        other.load_state_dict(optimizer.state_dict())
        resumed = GroupedLR(other, SCHEDULES, last_epoch=schedule.last_epoch - 1)
    else:
        resumed = copy.deepcopy(schedule)
        if way == "pickled":
            resumed = pickle.loads(pickle.dumps(schedule))  # noqa: S301  (pickled by this test)
        other = resumed.optimizer

    assert rates_of(resumed, other, 5) == rates_of(schedule, optimizer, 5)


def test_a_skipped_update_holds_all_schedules():
    """In a cell, no group's rate advances at an overflow; the report has all rates by name."""
    network = WithLossCell(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1)), nn.MSELoss())
    first, second = network.backbone
    optimizer = SGD(
        [
            {"name": "first", "params": first.parameters(), "lr": 1.0},
            {"name": "second", "params": second.parameters(), "lr": 0.5},
        ]
    )
    cell = MFTrainOneStepCell(
        network, optimizer, lr_scheduler=GroupedLR(optimizer, [COSINE, CONSTANT])
    )
    rates = []
    for step in range(4):
        inputs = torch.full((1, 2), float("inf") if step == 1 else 1.0)
        cell(inputs, torch.ones(1, 1))
        rates.append(cell.last_report.learning_rates.tolist())

    assert cell.last_report.learning_rate_names == ("first", "second")
    expected = [[0.0, 0.0], [0.5, 0.5 / 3], [0.5, 0.5 / 3], [1.0, 1 / 3]]
    assert rates == [pytest.approx(each) for each in expected]


def test_wrong_schedules():
    """There must be one schedule of mfwrap for each parameter group."""
    optimizer = optimizer_with(RATES)
    says = "`schedules` must have a function for each of the 3 parameter groups, got 1"
    with pytest.raises(ValueError, match=says):
        GroupedLR(optimizer, [COSINE])
    with pytest.raises(TypeError, match="`schedules` must return schedules of mfwrap, got"):
        GroupedLR(optimizer, [lambda each: LambdaLR(each, lambda _: 1.0)] * 3)
