"""How long steps take, and the mean of their losses."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.callbacks.loss_monitor.run import EpochMean
from mfwrap.callbacks.shared.step_clock import StepClock


def clock_of(*times: float) -> StepClock:
    """Return a clock that reads these times, one after the other."""
    return StepClock(iter(times).__next__)


def run_steps(*seconds: float) -> StepClock:
    """Return a clock after steps of these lengths."""
    times = [0.0]
    for step in seconds:
        times.append(times[-1] + step)
    clock = clock_of(*times)
    clock.restart()
    for _ in seconds:
        clock.end_step()
    return clock


def test_a_lap_is_the_mean_of_its_steps():
    """A lap is the mean over the steps since the last one."""
    clock = clock_of(0.0, 1.0, 3.0, 7.0)
    clock.restart()
    clock.end_step()
    clock.end_step()
    assert clock.end_lap() == 1.5

    clock.end_step()
    assert clock.end_lap() == 4.0
    assert clock.end_lap() == 0.0


def test_time_between_steps_is_left_out():
    """What comes before a restart is no part of the next step."""
    clock = clock_of(0.0, 1.0, 100.0, 102.0)
    clock.restart()
    clock.end_step()
    clock.restart()
    clock.end_step()

    assert clock.end_lap() == 1.5


def test_a_step_that_began_unseen_has_no_time():
    """Without a restart before it, a step is not measured; the next one is."""
    clock = clock_of(50.0, 52.0)
    clock.end_step()
    assert (clock.end_lap(), clock.typical_seconds) == (0.0, 0.0)

    clock.end_step()
    assert clock.end_lap() == 2.0


def test_a_clock_that_is_set_back():
    """A step never takes less than no time."""
    clock = clock_of(10.0, 4.0)
    clock.restart()
    clock.end_step()

    assert clock.end_lap() == 0.0


def test_the_first_step_is_left_out():
    """The first step, which warms up, counts only as long as there is no other."""
    assert run_steps(600.0).typical_seconds == 600.0
    assert run_steps(600.0, 2.0).typical_seconds == pytest.approx(2.0)
    assert run_steps(600.0, *[2.0] * 30).typical_seconds == pytest.approx(2.0)


@given(st.lists(st.floats(0.001, 1000), min_size=1, max_size=30))
def test_typical_time_is_an_exponential_mean(seconds):
    """The typical time weighs a step by 0.9 to the number of steps after it."""
    weights = [0.9**age for age in range(len(seconds))][::-1]
    mean = sum(w * s for w, s in zip(weights, seconds, strict=True)) / sum(weights)

    assert run_steps(5.0, *seconds).typical_seconds == pytest.approx(mean, rel=1e-9)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=20))
def test_mean_of_an_epoch(losses):
    """The mean is over the losses so far; another epoch begins anew."""
    mean = EpochMean()
    mean.add(123.0, epoch=(1, 0))
    for number, loss in enumerate(losses, start=1):
        mean.add(loss, epoch=(2, 1))
        assert mean.value == pytest.approx(math.fsum(losses[:number]) / number, abs=1e-6)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite(loss):
    """It is counted and left out of the mean; alone it leaves no mean."""
    mean = EpochMean()
    mean.add(loss, epoch=(1, 0))
    assert math.isnan(mean.value)

    mean.add(3.0, epoch=(1, 0))
    mean.add(loss, epoch=(1, 0))
    assert (mean.value, mean.num_not_finite) == (3.0, 2)


def test_a_loss_that_stands_for_several_steps():
    """The mean of several steps has their weight."""
    mean = EpochMean()
    mean.add(1.0, epoch=(1, 0))
    mean.add(5.0, epoch=(1, 0), num_steps=3)

    assert mean.value == 4.0


def test_a_saved_mean_goes_on():
    """A mean that was saved goes on within its epoch, and ends with it."""
    mean = EpochMean()
    assert mean.save(0) is None
    for loss in (1.0, math.nan, 2.0):
        mean.add(loss, epoch=(2, 1))
    saved = mean.save(7)
    assert saved == {
        "global_step": 7,
        "epoch": 2,
        "total": 3.0,
        "num_losses": 2,
        "num_not_finite": 1,
    }

    later = EpochMean(saved)
    later.add(6.0, epoch=(2, 0))
    assert (later.value, later.num_not_finite) == (3.0, 1)
    later.add(6.0, epoch=(3, 1))
    assert later.value == 6.0
