"""A learning rate is judged by its course: a warm-up rises, too."""

import json
import math

import pytest
import torch
from transformers import get_scheduler

from mfwrap.callbacks.culprit.judges.rates import RateCourse


def rises(rates, course=None):
    """Return the rises by the number of their step, counted from 0."""
    course = course or RateCourse()
    found = {step: course.add(rate, rate, applied=True) for step, rate in enumerate(rates)}
    return {step: one for step, one in found.items() if one is not None}


def scheduled(name, num_steps=200, **settings):
    """Return the rates of a schedule of transformers or torch."""
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1e-3)
    if hasattr(torch.optim.lr_scheduler, name):
        schedule = getattr(torch.optim.lr_scheduler, name)(optimizer, **settings)
    else:
        schedule = get_scheduler(
            name,
            optimizer,
            num_training_steps=num_steps,
            scheduler_specific_kwargs=settings,
            num_warmup_steps=50,
        )
    found = []
    for _ in range(num_steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


@pytest.mark.parametrize(
    "rates",
    [
        scheduled("constant"),
        scheduled("constant_with_warmup"),
        scheduled("linear"),
        scheduled("cosine"),
        scheduled("cosine_with_restarts", num_cycles=3),
        scheduled("OneCycleLR", max_lr=0.1, total_steps=300),
        scheduled("CosineAnnealingWarmRestarts", T_0=20),
        scheduled("CyclicLR", base_lr=1e-4, max_lr=1e-2, step_size_up=20),
        scheduled("ExponentialLR", gamma=1.2),
        scheduled("StepLR", step_size=30),
    ],
)
def test_schedules(rates):
    """A warm-up, a restart and a test of rates that rise from the start on are ordinary."""
    assert not rises(rates)


def test_a_jump():
    """It is found once; what comes after it is compared with it."""
    rates = [1e-3] * 10 + [5e-3] * 10
    (step, found), *others = rises(rates).items()
    assert (step, found.before, found.now, found.num_steps) == (10, 1e-3, 5e-3, 1)
    assert found.ratio == pytest.approx(5.0)
    assert not others
    assert not rises([1e-3] * 10 + [4.9e-3] * 10)
    assert not rises([0.0] * 10 + [1e-3] * 10), "there was no rate before"


@pytest.mark.parametrize("start", [1, 7])
def test_a_jump_in_a_warm_up(start):
    """Within the first five updates, a rate may be almost zero."""
    rates = [1e-6 * (step + 1) for step in range(start)] + [1e-3] * 3
    assert list(rises(rates)) == ([] if start == 1 else [start])


def test_a_rise_over_many_steps():
    """It is found from five times the highest rate before it on, as long as the rate rises."""
    rates = [1e-3] * 10 + [1e-3 * 1.3**number for number in range(1, 11)] + [1e-2] * 5
    found = rises(rates)
    assert list(found) == [16, 17, 18, 19]
    assert [one.num_steps for one in found.values()] == [7, 8, 9, 10]
    assert {one.before for one in found.values()} == {1e-3}


def test_a_rise_that_leaves_a_warm_up():
    """It is found from five times the rate of eight steps before on."""
    rates = [1e-4 * step for step in range(1, 21)]
    rates += [2e-3 * 1.5**number for number in range(1, 8)]
    (first, *_), (found, *_) = zip(*rises(rates).items(), strict=True)
    assert first == 23
    assert (found.before, found.num_steps) == (pytest.approx(1.6e-3), 8)


def test_a_lowered_rate():
    """What a rollback lowers is followed as the rate that the schedule has."""
    course = RateCourse()
    for _ in range(10):
        course.add(1e-3, 1e-3, applied=True)
    for rate in (*[1e-5] * 10, *[1e-3] * 10):
        assert course.add(rate, 1e-3, applied=True) is None


def test_a_skipped_update_and_an_unknown_rate():
    """The rate of a skipped update is judged, and the next one is compared with those before."""
    course = RateCourse()
    assert not rises([1e-3] * 10, course)
    for _ in range(2):
        assert course.add(1.0, 1.0, applied=False) is not None
        assert course.add(math.nan, math.nan, applied=True) is None
    assert course.add(1e-3, 1e-3, applied=True) is None


def test_a_state():
    """A course that continues from its state finds what the other one finds."""
    rates = [1e-3] * 10 + [1e-3 * 1.3**number for number in range(1, 11)]
    course, later = RateCourse(), RateCourse()
    assert not rises(rates[:13], course)
    later.load_state_dict(json.loads(json.dumps(course.state_dict())))
    assert rises(rates[13:], later) == rises(rates[13:], course) != {}
