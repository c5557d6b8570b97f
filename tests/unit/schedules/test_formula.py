"""Every schedule sets rates per group, saves its state, and checks its arguments."""

import io
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD

from mfwrap import MFTrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell
from mfwrap.schedules import (
    ConstantWarmUpLR,
    ConstantWithCoolDownLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CosineWithWarmUpLR,
    LinearWithWarmUpLR,
    PolynomialWithWarmUpLR,
    WarmUpStableDecayLR,
)
from support.schedules import SETTINGS, TEN, assert_follows, optimizer, rates


def test_each_group_has_its_own_rate():
    """Each group starts from its own rate, and all groups fall to the same ``lr_end``."""
    stepped = optimizer(1.0, 0.5)
    schedule = PolynomialWithWarmUpLR(stepped, warmup_steps=0, total_steps=2, lr_end=0.1)
    stepped.step()
    schedule.step()
    assert [group["lr"] for group in stepped.param_groups] == pytest.approx([0.55, 0.3])


@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__name__)
def test_a_tensor_as_rate(kind):
    """A learning rate that is a tensor is changed in place."""
    fixed = torch.full((), 0.3, dtype=torch.float64)
    stepped = SGD([torch.zeros(1, requires_grad=True)], lr=fixed, foreach=False)
    schedule = kind(stepped, **SETTINGS[kind])
    for expected in rates(kind, range(12), lr=0.3, **SETTINGS[kind]):
        assert stepped.param_groups[0]["lr"].item() == pytest.approx(expected)
        stepped.step()
        schedule.step()
    assert stepped.param_groups[0]["lr"] is fixed


@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__name__)
def test_state_goes_through_a_file(kind):
    """A state that is loaded from a file with ``weights_only`` continues the schedule."""
    saved, restored = (kind(optimizer(0.3), **SETTINGS[kind]) for _ in range(2))
    for _ in range(3):
        saved.optimizer.step()
        saved.step()
    file = io.BytesIO()
    torch.save({"schedule": saved.state_dict(), "optimizer": saved.optimizer.state_dict()}, file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    restored.load_state_dict(state["schedule"])
    restored.optimizer.load_state_dict(state["optimizer"])

    assert_follows(saved, restored, 12)


def training(cell, kind):
    """Build a cell with a small network and a schedule; return the cell and the schedule."""
    network = WithLossCell(nn.Linear(2, 1), nn.MSELoss())
    stepped = SGD(network.parameters(), lr=0.3)
    schedule = kind(stepped, **SETTINGS[kind])
    return cell(network, stepped, scale_sense=torch.tensor(8.0), lr_scheduler=schedule), schedule


@pytest.mark.parametrize("cell", [MFTrainOneStepCell, TrainOneStepWithLossScaleCell])
@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__name__)
def test_the_cell_steps_it_for_applied_updates(kind, cell):
    """The cell steps the schedule for each applied update, and not for skipped updates."""
    step, schedule = training(cell, kind)
    expected = iter(rates(kind, range(12), lr=0.3, **SETTINGS[kind]))
    used = []
    for index in range(8):
        value = math.inf if index in {0, 3} else 1.0
        output = step(torch.full((4, 2), value), torch.ones(4, 1))
        used.append(schedule.get_last_lr()[0])
        assert output.overflow.item() == (index in {0, 3})
    step.flush()
    applied = [rate for index, rate in enumerate(used) if index not in {0, 3}]
    assert applied == pytest.approx([next(expected) for _ in applied])
    assert schedule.last_epoch == 6
    assert schedule.get_last_lr()[0] == pytest.approx(next(expected))


ERRORS = {
    "no warm-up": (ConstantWarmUpLR, {}, TypeError, "`warmup_steps` must be an int, got None"),
    "float": (ConstantWarmUpLR, {"warmup_steps": 2.0}, TypeError, "`warmup_steps` must be an int"),
    "bool": (ConstantWarmUpLR, {"warmup_steps": True}, TypeError, "`warmup_steps` must be an int"),
    "negative": (ConstantWarmUpLR, {"warmup_steps": -1}, ValueError, "`warmup_steps` must be >= 0"),
    "ratio": (
        LinearWithWarmUpLR,
        {"warmup_ratio": 1.5, "total_steps": 4},
        ValueError,
        r"`warmup_ratio` must be in \[0, 1\], got 1.5",
    ),
    "ratio of text": (
        LinearWithWarmUpLR,
        {"warmup_ratio": "1", "total_steps": 4},
        TypeError,
        "`warmup_ratio` must be a number",
    ),
    "ratio of what": (ConstantWarmUpLR, {"warmup_ratio": 0.5}, ValueError, "needs `total_steps`"),
    "no length": (
        CosineWithWarmUpLR,
        {"total_steps": None},
        ValueError,
        "`total_steps` must be given",
    ),
    "length": (CosineWithWarmUpLR, {"total_steps": 0}, ValueError, "`total_steps` must be >= 1"),
    "init": (
        ConstantWarmUpLR,
        {"warmup_steps": 1, "warmup_lr_init": -0.1},
        ValueError,
        "`warmup_lr_init` must be >= 0 and finite",
    ),
    "end": (
        PolynomialWithWarmUpLR,
        {**TEN, "lr_end": 0.3},
        ValueError,
        "`lr_end` must be below the initial rate of each group, got 0.3 for a .* rate 0.3",
    ),
    "power": (PolynomialWithWarmUpLR, {**TEN, "power": 0}, ValueError, "`power` must be > 0"),
    "decay": (
        PolynomialWithWarmUpLR,
        {**TEN, "decay_steps": 0},
        ValueError,
        "`decay_steps` must be >= 1",
    ),
    "no decay": (WarmUpStableDecayLR, TEN, TypeError, "`decay_start_steps` must be an int"),
    "early decay": (
        WarmUpStableDecayLR,
        {**TEN, "decay_start_steps": 1},
        ValueError,
        r"`decay_start_steps` must be in \[2, 10\], .* got 1",
    ),
    "a warm-up is checked before the fall": (
        WarmUpStableDecayLR,
        {"total_steps": 10, "decay_start_steps": 11},
        TypeError,
        "`warmup_steps` must be an int, got None",
    ),
    "a fall within a warm-up beyond the run": (
        WarmUpStableDecayLR,
        {"total_steps": 10, "decay_start_steps": 9, "warmup_steps": 12},
        ValueError,
        r"`decay_start_steps` must be in \[10, 10\], .* got 9",
    ),
    "no length of a fall": (
        ConstantWithCoolDownLR,
        {"warmup_steps": 0},
        ValueError,
        "`total_steps` must be given",
    ),
    "nothing left to fall": (
        ConstantWithCoolDownLR,
        {"warmup_steps": 2, "keep_steps": 8, "total_steps": 10},
        ValueError,
        "`decay_steps` must be >= 1, got 0",
    ),
    "keep": (
        ConstantWithCoolDownLR,
        {"warmup_steps": 0, "keep_steps": -1, "decay_steps": 1},
        ValueError,
        "`keep_steps` must be >= 0",
    ),
    "cycles": (CosineWithWarmUpLR, {**TEN, "num_cycles": math.nan}, ValueError, "`num_cycles`"),
    "t_max": (CosineAnnealingLR, {"t_max": 0}, ValueError, "`t_max` must be >= 1"),
    "t_mult": (
        CosineAnnealingWarmRestarts,
        {"t_0": 1, "t_mult": 1.5},
        TypeError,
        "`t_mult` must be an int",
    ),
    "unknown": (ConstantWarmUpLR, {"warmup_step": 1}, TypeError, "unexpected keyword"),
}


@pytest.mark.parametrize(("kind", "settings", "error", "message"), ERRORS.values(), ids=ERRORS)
def test_errors(kind, settings, error, message):
    """Each wrong argument is refused at construction, and the optimizer keeps its rate."""
    stepped = optimizer(0.3)
    with pytest.raises(error, match=message):
        kind(stepped, **settings)
    assert stepped.param_groups[0]["lr"] == 0.3


@pytest.mark.parametrize("kind", [CosineWithWarmUpLR, LinearWithWarmUpLR, PolynomialWithWarmUpLR])
def test_a_warm_up_that_is_longer_than_the_run(kind):
    """The run has the rates of its part of the warm-up, as in MindFormers, with a warning."""
    with pytest.warns(UserWarning, match="the warm-up has 8 updates, the run 4: no update has"):
        schedule = kind(optimizer(0.4), total_steps=4, warmup_steps=8)

    assert [schedule.rate(0.4, step) for step in range(4)] == pytest.approx([0, 0.05, 0.1, 0.15])


def test_the_initial_rate_is_compared_and_shown():
    """An error about `lr_end` shows the initial rate, with which `lr_end` is compared."""
    resumed = optimizer(0.3)
    resumed.param_groups[0] |= {"initial_lr": 0.1, "lr": 0.3}

    with pytest.raises(ValueError, match=r"got 0\.2 for a group with the initial rate 0\.1"):
        PolynomialWithWarmUpLR(resumed, lr_end=0.2, **TEN)
