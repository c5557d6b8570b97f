"""A step advances only schedules that it can advance by itself."""

import pytest
import torch
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from mfwrap.step.schedules import checked_schedule


def sgd():
    """Return an optimizer of one weight."""
    return SGD([nn.Parameter(torch.ones(1))], lr=0.1)


def test_a_schedule_of_the_optimizer_is_taken():
    """A schedule that needs no metric is returned as it is; there may be none."""
    optimizer = sgd()
    schedule = StepLR(optimizer, 1)

    assert checked_schedule(schedule, optimizer) is schedule
    assert checked_schedule(None, optimizer) is None


@pytest.mark.parametrize(
    ("build", "error", "message"),
    [
        (lambda _: 0.1, TypeError, "must be a learning-rate scheduler, got 0.1"),
        (ReduceLROnPlateau, TypeError, "ReduceLROnPlateau, whose step needs metrics"),
        (lambda _: StepLR(sgd(), 1), ValueError, "must belong to the cell's optimizer"),
    ],
)
def test_other_schedules_are_refused(build, error, message):
    """A schedule that needs a metric, or of another optimizer, is refused by name."""
    optimizer = sgd()

    with pytest.raises(error, match=message):
        checked_schedule(build(optimizer), optimizer)
