"""The mean of an epoch's losses."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.callbacks.loss_monitor.run import EpochMean


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
