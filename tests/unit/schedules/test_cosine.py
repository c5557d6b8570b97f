"""Cosine schedules agree with torch, with transformers and with MindFormers' formulas."""

import itertools

import pytest
import transformers
from hypothesis import given
from hypothesis import strategies as st
from torch.optim import lr_scheduler as torch_schedules

from mfwrap.schedules import (
    ConstantWithCoolDownLR,
    CosineAnnealingLR,
    CosineAnnealingWarmRestarts,
    CosineWithRestartsAndWarmUpLR,
    CosineWithWarmUpLR,
)
from support.schedules import TEN, assert_follows, optimizer, rates

run = st.tuples(st.integers(0, 12), st.integers(1, 30))
"""Lengths of the warm-up and of the rest of a run."""


@given(run)
def test_cosine_is_transformers(lengths):
    """The cosine schedule agrees with that of transformers up to the last step."""
    warm_up, rest = lengths
    ours = CosineWithWarmUpLR(optimizer(0.3), warmup_steps=warm_up, total_steps=warm_up + rest)
    other = transformers.get_cosine_schedule_with_warmup(optimizer(0.3), warm_up, warm_up + rest)
    assert_follows(ours, other, warm_up + rest)


@given(run, st.integers(1, 3))
def test_restarts_are_transformers(lengths, cycles):
    """The schedule with hard restarts agrees with transformers, also after the last step."""
    warm_up, total = lengths[0], sum(lengths)
    ours = CosineWithRestartsAndWarmUpLR(
        optimizer(0.3), warmup_steps=warm_up, total_steps=total, num_cycles=cycles
    )
    make = transformers.get_cosine_with_hard_restarts_schedule_with_warmup
    assert_follows(ours, make(optimizer(0.3), warm_up, total, cycles), total + 3)


parts = st.tuples(*[st.integers(low, 9) for low in (0, 0, 1, 0)])
"""Lengths of the four phases: warm-up, constant rate, fall and hold."""


@given(parts, st.sampled_from([None, 0.02]))
def test_a_cool_down_is_its_parts(lengths, last):
    """The phases are a linear warm-up, a constant rate, torch's cosine, and two constant rates."""
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
    """The rate falls over the remaining steps by default, or over a share of the run."""
    given_as = {"warmup_steps": 2, "keep_steps": 3, "final_steps": 1, "total_steps": 10}
    rest = ConstantWithCoolDownLR(optimizer(1.0), **given_as, lr_end1=0.1, lr_end2=0.05)
    part = ConstantWithCoolDownLR(optimizer(1.0), **given_as, decay_ratio=0.25)

    assert [rest.rate(1.0, step) for step in (5, 7, 9, 10)] == pytest.approx([1, 0.55, 0.1, 0.05])
    assert part.decay_steps == 2


@given(st.integers(1, 12))
def test_annealing_is_torch(period):
    """The cosine without a warm-up agrees with torch's schedule."""
    ours = CosineAnnealingLR(optimizer(0.3), t_max=period, eta_min=0.01)
    other = torch_schedules.CosineAnnealingLR(optimizer(0.3), period, eta_min=0.01)
    assert_follows(ours, other, 40)


@given(st.integers(1, 12), st.integers(1, 3))
def test_warm_restarts_are_torch(period, factor):
    """The cosine with restarts and without a warm-up agrees with torch's schedule."""
    ours = CosineAnnealingWarmRestarts(optimizer(0.3), t_0=period, t_mult=factor, eta_min=0.01)
    other = torch_schedules.CosineAnnealingWarmRestarts(optimizer(0.3), period, factor, 0.01)
    assert_follows(ours, other, 60)


def test_warm_restarts_restart_on_time():
    """At each restart the rate is exactly the group's rate, even in very long runs."""
    for t_0, t_mult in itertools.product((1, 3, 7, 10), (2, 3, 5)):
        schedule = CosineAnnealingWarmRestarts(optimizer(1.0), t_0=t_0, t_mult=t_mult)
        start, period = 0, t_0
        while start < 10**9:
            assert schedule.rate(1.0, start) == 1.0
            start, period = start + period, period * t_mult


def test_decay_cuts_a_cosine_off():
    """The rate is ``lr_end`` from step ``decay_steps`` on, or from the share ``decay_ratio`` on."""
    for given_as in (
        {"decay_steps": 6},
        {"decay_ratio": 0.6},
        {"decay_ratio": 0.6, "decay_steps": 1},
    ):
        schedule = CosineWithWarmUpLR(optimizer(1.0), **TEN, lr_end=0.1, **given_as)
        assert schedule.rate(1.0, 5) > 0.6
        assert schedule.rate(1.0, 6) == 0.1
