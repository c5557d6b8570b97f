"""MindFormers' schedules: its formulas, its published values, torch's and transformers' own."""

import io
import itertools
import math

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import SGD
from torch.optim import lr_scheduler as torch_schedules

from mfwrap import MFTrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell
from mfwrap.schedules import (
    SCHEDULES,
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
    """Return an optimizer of one parameter per rate."""
    groups = [{"params": [torch.zeros(1, requires_grad=True)], "lr": rate} for rate in rates]
    return SGD(groups, lr=rates[0])


def rates(kind, steps, *, lr=1.0, **settings):
    """Return the rate of each step, as the optimizer gets it."""
    stepped = optimizer(lr)
    schedule = kind(stepped, **settings)
    found = []
    for _ in range(max(steps) + 1):
        found.append(stepped.param_groups[0]["lr"])
        stepped.step()
        schedule.step()
    return [found[step] for step in steps]


def test_every_schedule_is_in_the_table():
    """The table of names is the list of classes, and the tests know them all."""
    assert set(SCHEDULES.values()) == SETTINGS.keys()
    assert all(name == kind.__name__ for name, kind in SCHEDULES.items())


TEN = {"warmup_steps": 2, "total_steps": 10}
RECORDED = {
    "cosine": (
        CosineWithWarmUpLR,
        {**TEN, "lr_end": 0.1},
        {0: 0, 1: 0.5, 2: 1, 6: 0.55, 9: 0.134254, 10: 0.1, 12: 0.1},
    ),
    "linear": (LinearWithWarmUpLR, TEN, {0: 0, 1: 0.5, 2: 1, 6: 0.5, 9: 0.125, 10: 0, 12: 0}),
    "polynomial": (
        PolynomialWithWarmUpLR,
        {**TEN, "lr_end": 0.1},
        {0: 0, 1: 0.5, 2: 1, 6: 0.55, 9: 0.2125, 10: 0.1, 12: 0.1},
    ),
    "restarts": (
        CosineWithRestartsAndWarmUpLR,
        {**TEN, "lr_end": 0.1, "num_cycles": 2},
        {0: 0, 1: 0.5, 2: 1, 4: 0.55, 6: 1, 9: 0.231802, 10: 0.1},
    ),
    "stable": (
        WarmUpStableDecayLR,
        {**TEN, "lr_end": 0.1, "decay_start_steps": 5},
        {0: 0, 1: 0.5, 2: 1, 5: 1, 7: 0.64, 10: 0.1},
    ),
}
TWENTY = {"warmup_steps": 10, "total_steps": 20}
PUBLISHED = {
    "constant": (ConstantWarmUpLR, TWENTY, {1: 0.0005, 15: 0.005}),
    "linear": (LinearWithWarmUpLR, TWENTY, {1: 0.0005, 15: 0.0025}),
    "cosine": (CosineWithWarmUpLR, TWENTY, {1: 0.0005, 15: 0.0024999997}),
    "restarts": (CosineWithRestartsAndWarmUpLR, TWENTY, {1: 0.0005, 15: 0.0024999997}),
    "polynomial": (PolynomialWithWarmUpLR, TWENTY, {1: 0.0005, 15: 0.0025000498}),
    "annealing": (
        CosineAnnealingLR,
        {"t_max": 10, "eta_min": 1e-7},
        {1: 0.0048776437, 15: 0.0025000498},
    ),
    "warm restarts": (
        CosineAnnealingWarmRestarts,
        {"t_0": 10, "t_mult": 2, "eta_min": 1e-7},
        {1: 0.0048776437, 15: 0.0042677815},
    ),
}


@pytest.mark.parametrize(("kind", "settings", "expected"), RECORDED.values(), ids=RECORDED)
def test_recorded_rates(kind, settings, expected):
    """Rates that MindFormers gave for a run of ten steps, two of them warm-up."""
    assert rates(kind, list(expected), **settings) == pytest.approx(
        list(expected.values()), abs=1e-6
    )


@pytest.mark.parametrize(("kind", "settings", "expected"), PUBLISHED.values(), ids=PUBLISHED)
def test_published_rates(kind, settings, expected):
    """Rates that MindFormers' documentation shows, which are float32."""
    assert rates(kind, list(expected), lr=0.005, **settings) == pytest.approx(
        list(expected.values()), rel=2e-7
    )


run = st.tuples(st.integers(0, 12), st.integers(1, 30))
"""Lengths of the warm-up and of the rest of a run."""


def assert_follows(schedule, other, steps):
    """Compare two schedules over so many updates."""
    for _ in range(steps):
        assert schedule.get_last_lr() == pytest.approx(other.get_last_lr(), rel=1e-12, abs=1e-12)
        for one in (schedule, other):
            one.optimizer.step()
            one.step()


@given(run)
def test_linear_is_transformers(lengths):
    """The linear schedule is the one of transformers, to the last step and beyond."""
    warm_up, rest = lengths
    ours = LinearWithWarmUpLR(optimizer(0.3), warmup_steps=warm_up, total_steps=warm_up + rest)
    other = transformers.get_linear_schedule_with_warmup(optimizer(0.3), warm_up, warm_up + rest)
    assert_follows(ours, other, warm_up + rest + 3)


@given(run)
def test_cosine_is_transformers(lengths):
    """The cosine schedule is the one of transformers up to the last step."""
    warm_up, rest = lengths
    ours = CosineWithWarmUpLR(optimizer(0.3), warmup_steps=warm_up, total_steps=warm_up + rest)
    other = transformers.get_cosine_schedule_with_warmup(optimizer(0.3), warm_up, warm_up + rest)
    assert_follows(ours, other, warm_up + rest)


@given(run, st.integers(1, 3))
def test_restarts_are_transformers(lengths, cycles):
    """The schedule with hard restarts is the one of transformers, to the last step and beyond."""
    warm_up, total = lengths[0], sum(lengths)
    ours = CosineWithRestartsAndWarmUpLR(
        optimizer(0.3), warmup_steps=warm_up, total_steps=total, num_cycles=cycles
    )
    make = transformers.get_cosine_with_hard_restarts_schedule_with_warmup
    assert_follows(ours, make(optimizer(0.3), warm_up, total, cycles), total + 3)


@given(run, st.sampled_from([0.5, 1.0, 2.0]))
def test_polynomial_is_transformers(lengths, power):
    """The polynomial schedule is the one of transformers, to the last step and beyond."""
    warm_up, total = lengths[0], sum(lengths)
    ours = PolynomialWithWarmUpLR(
        optimizer(0.3), warmup_steps=warm_up, total_steps=total, lr_end=0.01, power=power
    )
    other = transformers.get_polynomial_decay_schedule_with_warmup(
        optimizer(0.3), warm_up, total, lr_end=0.01, power=power
    )
    assert_follows(ours, other, total + 3)


parts = st.tuples(*[st.integers(low, 9) for low in (0, 0, 1, 0)])
"""Lengths of warm-up, constant part, fall and hold."""


@given(parts, st.sampled_from([None, 0.02]))
def test_a_cool_down_is_its_parts(lengths, last):
    """Linear, constant, torch's cosine, constant, and constant again, one after the other."""
    warm_up, keep, fall, hold = lengths
    stepped = optimizer(0.3)
    cosine = torch_schedules.CosineAnnealingLR(stepped, fall, eta_min=0.1)
    falling = []
    for _ in range(fall):
        falling.append(cosine.get_last_lr()[0])
        stepped.step()
        cosine.step()
    expected = [0.3 * step / warm_up for step in range(warm_up)] + [0.3] * keep + falling
    expected += [0.1] * hold + [0.1 if last is None else last] * 3

    actual = rates(
        ConstantWithCoolDownLR,
        range(len(expected)),
        lr=0.3,
        warmup_steps=warm_up,
        keep_steps=keep,
        decay_steps=fall,
        final_steps=hold,
        lr_end1=0.1,
        lr_end2=last,
    )
    assert actual == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_a_cool_down_falls_over_what_is_left():
    """Without a length of its own the fall ends where the hold begins, or is a part of the run."""
    given_as = {"warmup_steps": 2, "keep_steps": 3, "final_steps": 1, "total_steps": 10}
    rest = ConstantWithCoolDownLR(optimizer(1.0), **given_as, lr_end1=0.1, lr_end2=0.05)
    part = ConstantWithCoolDownLR(optimizer(1.0), **given_as, decay_ratio=0.25)

    assert [rest.rate(1.0, step) for step in (5, 7, 9, 10)] == pytest.approx([1, 0.55, 0.1, 0.05])
    assert part.decay_steps == 2


@given(st.integers(1, 12))
def test_annealing_is_torch(period):
    """The cosine without a warm-up is torch's."""
    ours = CosineAnnealingLR(optimizer(0.3), t_max=period, eta_min=0.01)
    other = torch_schedules.CosineAnnealingLR(optimizer(0.3), period, eta_min=0.01)
    assert_follows(ours, other, 40)


@given(st.integers(1, 12), st.integers(1, 3))
def test_warm_restarts_are_torch(period, factor):
    """The cosine with restarts and without a warm-up is torch's."""
    ours = CosineAnnealingWarmRestarts(optimizer(0.3), t_0=period, t_mult=factor, eta_min=0.01)
    other = torch_schedules.CosineAnnealingWarmRestarts(optimizer(0.3), period, factor, 0.01)
    assert_follows(ours, other, 60)


def test_warm_restarts_restart_on_time():
    """At each restart the rate is the group's, however long the run."""
    for t_0, t_mult in itertools.product((1, 3, 7, 10), (2, 3, 5)):
        schedule = CosineAnnealingWarmRestarts(optimizer(1.0), t_0=t_0, t_mult=t_mult)
        start, period = 0, t_0
        while start < 10**9:
            assert schedule.rate(1.0, start) == 1.0
            start, period = start + period, period * t_mult


@given(run, st.floats(0.0, 0.9), st.integers(1, 60), st.data())
def test_rates_stay_between_their_ends(lengths, lr_end, decay_steps, data):
    """Whatever the settings, no rate is nan, above the group's or below the ends."""
    warm_up, total = lengths[0], sum(lengths)
    common = {"warmup_steps": warm_up, "total_steps": total, "lr_end": lr_end}
    begins = data.draw(st.integers(warm_up, total))
    schedules = (
        CosineWithWarmUpLR(optimizer(1.0), decay_steps=decay_steps, **common),
        CosineWithRestartsAndWarmUpLR(optimizer(1.0), decay_steps=decay_steps, **common),
        PolynomialWithWarmUpLR(optimizer(1.0), decay_steps=decay_steps, power=1.5, **common),
        WarmUpStableDecayLR(optimizer(1.0), decay_start_steps=begins, **common),
    )
    for schedule in schedules:
        for step in range(warm_up, total + 20):
            assert lr_end - 1e-12 <= schedule.rate(1.0, step) <= 1.0 + 1e-12
        assert schedule.rate(1.0, total + 1) == lr_end


MENDED = {
    "stable, first step": (
        WarmUpStableDecayLR,
        {"warmup_steps": 0, "total_steps": 4, "decay_start_steps": 2},
        {0: 1.0},
    ),
    "stable, after the run": (
        WarmUpStableDecayLR,
        {"warmup_steps": 0, "total_steps": 4, "decay_start_steps": 2, "lr_end": 0.1},
        {3: 0.55, 4: 0.1, 9: 0.1},
    ),
    "cosine": (CosineWithWarmUpLR, {"total_steps": 4, "decay_steps": 9, "lr_end": 0.1}, {8: 0.1}),
    "restarts": (
        CosineWithRestartsAndWarmUpLR,
        {"warmup_steps": 0, "total_steps": 4, "decay_steps": 9, "lr_end": 0.1},
        {4: 0.1, 8: 0.1},
    ),
    "polynomial": (
        PolynomialWithWarmUpLR,
        {"warmup_steps": 0, "total_steps": 9, "decay_steps": 3, "lr_end": 0.1, "power": 2},
        {3: 0.1, 6: 0.1, 9: 0.1},
    ),
}


@pytest.mark.parametrize(("kind", "settings", "expected"), MENDED.values(), ids=MENDED)
def test_mended_steps(kind, settings, expected):
    """Where MindFormers' formula leaves its range, the rate is that of the nearer end."""
    assert rates(kind, list(expected), **settings) == pytest.approx(list(expected.values()))


def test_decay_cuts_a_cosine_off():
    """From ``decay_steps`` on the rate is the last one, also where that is given as a part."""
    for given_as in (
        {"decay_steps": 6},
        {"decay_ratio": 0.6},
        {"decay_ratio": 0.6, "decay_steps": 1},
    ):
        schedule = CosineWithWarmUpLR(optimizer(1.0), **TEN, lr_end=0.1, **given_as)
        assert schedule.rate(1.0, 5) > 0.6
        assert schedule.rate(1.0, 6) == 0.1


def test_a_ratio_takes_precedence():
    """``warmup_ratio`` is a part of the run, rounded down."""
    schedule = LinearWithWarmUpLR(optimizer(1.0), total_steps=15, warmup_ratio=0.25, warmup_steps=9)
    assert schedule.warmup_steps == 3
    assert schedule.rate(1.0, 2) == pytest.approx(2 / 3)


def test_warm_up_from_a_rate():
    """The first update has ``warmup_lr_init``, the one after the warm-up the group's rate."""
    schedule = ConstantWarmUpLR(optimizer(1.0), warmup_steps=4, warmup_lr_init=0.2)
    assert [schedule.rate(1.0, step) for step in (0, 2, 4)] == pytest.approx([0.2, 0.6, 1.0])


def test_each_group_has_its_own_rate():
    """The group's rate takes the place of ``learning_rate``; the ends are common."""
    stepped = optimizer(1.0, 0.5)
    schedule = PolynomialWithWarmUpLR(stepped, warmup_steps=0, total_steps=2, lr_end=0.1)
    stepped.step()
    schedule.step()
    assert [group["lr"] for group in stepped.param_groups] == pytest.approx([0.55, 0.3])


@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__name__)
def test_a_tensor_as_rate(kind):
    """A rate that is a tensor is changed in place, to the same numbers."""
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
    """The state holds numbers alone, loads without unpickling, and goes on where it was."""
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
    """Return a cell of a small network whose rate follows a schedule, and both."""
    network = WithLossCell(nn.Linear(2, 1), nn.MSELoss())
    stepped = SGD(network.parameters(), lr=0.3)
    schedule = kind(stepped, **SETTINGS[kind])
    return cell(network, stepped, scale_sense=torch.tensor(8.0), lr_scheduler=schedule), schedule


@pytest.mark.parametrize("cell", [MFTrainOneStepCell, TrainOneStepWithLossScaleCell])
@pytest.mark.parametrize("kind", SETTINGS, ids=lambda kind: kind.__name__)
def test_the_cell_steps_it_for_applied_updates(kind, cell):
    """A skipped update leaves the schedule where it is; every other takes the next rate."""
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
    "too long": (
        LinearWithWarmUpLR,
        {"warmup_steps": 5, "total_steps": 4},
        ValueError,
        "`warmup_steps` must be <= total_steps=4, got 5",
    ),
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
        "`lr_end` must be below the rate 0.3 of each group, got 0.3",
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
