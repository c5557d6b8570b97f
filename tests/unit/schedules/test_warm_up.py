"""Schedules with a warm-up agree with transformers, and rates stay between their limits."""

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.schedules import (
    ConstantWarmUpLR,
    CosineWithRestartsAndWarmUpLR,
    CosineWithWarmUpLR,
    LinearWithWarmUpLR,
    PolynomialWithWarmUpLR,
    WarmUpStableDecayLR,
)
from support.schedules import assert_follows, optimizer, rates

run = st.tuples(st.integers(0, 12), st.integers(1, 30))
"""Lengths of the warm-up and of the rest of a run."""


@given(run | st.tuples(st.integers(1, 12), st.just(0)))
def test_linear_is_transformers(lengths):
    """The linear schedule agrees with that of transformers, also after a warm-up of all steps."""
    warm_up, rest = lengths
    ours = LinearWithWarmUpLR(optimizer(0.3), warmup_steps=warm_up, total_steps=warm_up + rest)
    other = transformers.get_linear_schedule_with_warmup(optimizer(0.3), warm_up, warm_up + rest)
    assert_follows(ours, other, warm_up + rest + 3)


@given(run, st.sampled_from([0.5, 1.0, 2.0]))
def test_polynomial_is_transformers(lengths, power):
    """The polynomial schedule agrees with that of transformers, also after the last step."""
    warm_up, total = lengths[0], sum(lengths)
    ours = PolynomialWithWarmUpLR(
        optimizer(0.3), warmup_steps=warm_up, total_steps=total, lr_end=0.01, power=power
    )
    other = transformers.get_polynomial_decay_schedule_with_warmup(
        optimizer(0.3), warm_up, total, lr_end=0.01, power=power
    )
    assert_follows(ours, other, total + 3)


@given(run, st.floats(0.0, 0.9), st.integers(1, 60), st.data())
def test_rates_stay_between_their_ends(lengths, lr_end, decay_steps, data):
    """For any settings, every rate after the warm-up is between ``lr_end`` and the group's rate."""
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
    """If MindFormers' formula leaves the range of valid rates, the rate is clipped to the range."""
    assert rates(kind, list(expected), **settings) == pytest.approx(list(expected.values()))


def test_a_ratio_takes_precedence():
    """``warmup_ratio`` is a share of the run, rounded down; it overrides ``warmup_steps``."""
    schedule = LinearWithWarmUpLR(optimizer(1.0), total_steps=15, warmup_ratio=0.25, warmup_steps=9)
    assert schedule.warmup_steps == 3
    assert schedule.rate(1.0, 2) == pytest.approx(2 / 3)


def test_warm_up_from_a_rate():
    """The warm-up begins at ``warmup_lr_init`` and ends at the group's rate."""
    schedule = ConstantWarmUpLR(optimizer(1.0), warmup_steps=4, warmup_lr_init=0.2)
    assert [schedule.rate(1.0, step) for step in (0, 2, 4)] == pytest.approx([0.2, 0.6, 1.0])
