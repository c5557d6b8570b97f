"""Schedules with small settings, and the rates that they set."""

import pytest
import torch
from torch.optim import SGD

from mfwrap.schedules import (
    ConstantWarmUpLR,
    ConstantWithCoolDownLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CosineWithRestartsAndWarmUpLR,
    CosineWithWarmUpLR,
    LinearWithWarmUpLR,
    PolynomialWithWarmUpLR,
    WarmUpStableDecayLR,
)

SETTINGS = {
    ConstantWarmUpLR: {"warmup_steps": 2},
    ConstantWithCoolDownLR: {"warmup_steps": 1, "keep_steps": 1, "decay_steps": 3, "lr_end1": 0.1},
    CosineAnnealingLR: {"t_max": 4},
    CosineAnnealingWarmRestarts: {"t_0": 2, "t_mult": 2},
    CosineWithRestartsAndWarmUpLR: {"warmup_steps": 2, "total_steps": 10, "num_cycles": 2},
    CosineWithWarmUpLR: {"warmup_steps": 2, "total_steps": 10},
    LinearWithWarmUpLR: {"warmup_steps": 2, "total_steps": 10},
    PolynomialWithWarmUpLR: {"warmup_steps": 2, "total_steps": 10},
    WarmUpStableDecayLR: {"warmup_steps": 2, "total_steps": 10, "decay_start_steps": 5},
}


def optimizer(*rates):
    """Return an optimizer with one group per rate, each with one parameter."""
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates]
    return SGD(groups, lr=rates[0])


def rates(kind, steps, *, lr=1.0, **settings):
    """Return the learning rates that the optimizer uses at the given steps, counted from 0."""
    stepped = optimizer(lr)
    schedule = kind(stepped, **settings)
    found = []
    for _ in range(max(steps) + 1):
        found.append(stepped.param_groups[0]["lr"])
        stepped.step()
        schedule.step()
    return [found[step] for step in steps]


def assert_follows(schedule, other, steps):
    """Assert that two schedules set the same rates for `steps` updates."""
    for _ in range(steps):
        assert schedule.get_last_lr() == pytest.approx(other.get_last_lr(), rel=1e-12, abs=1e-12)
        for one in (schedule, other):
            one.optimizer.step()
            one.step()


TEN = {"warmup_steps": 2, "total_steps": 10}
