"""Growth of updates is found where it is steady, and only at a rate that does not rise."""

import json
import math
import random

import pytest

from mfwrap.callbacks.culprit.judges.growth import Growth, UpdateGrowth


def grown(ratios: list[float], rates: list[float] | None = None) -> list[Growth | None]:
    """Return what each of these updates finds."""
    growth = UpdateGrowth()
    return [growth.add(*each) for each in zip(ratios, rates or [1e-3] * len(ratios), strict=True)]


def steady(first: float, last: float, number: int = 64) -> list[float]:
    """Return ratios that grow along a line of logarithms, up to a little noise."""
    dice = random.Random(0)  # noqa: S311  (test data, not cryptography)
    factor = (last / first) ** (1 / (number - 1))
    return [first * factor**n * math.exp(dice.gauss(0, 0.05)) for n in range(number)]


def test_steady_growth_is_found_when_64_updates_are_known():
    """The ends are those of the line."""
    *before, last = grown(steady(0.004, 0.04))
    assert before == [None] * 63
    assert last is not None
    assert (last.before, last.now) == pytest.approx((0.004, 0.04), rel=0.1)
    assert last.num_steps == 64


@pytest.mark.parametrize(
    "ratios",
    [
        steady(0.0004, 0.004),  # still small
        steady(0.02, 0.06),  # too slow
        steady(0.2, 0.02),
        [0.004] * 32 + [0.04] * 32,  # a jump
        [0.02] * 64,
    ],
)
def test_what_is_no_growth(ratios):
    """Small updates, slow growth, a fall, a jump, and updates that stay large."""
    assert grown(ratios) == [None] * 64


def test_a_rate_that_rises_explains_the_growth():
    """In a warm-up all updates grow."""
    ratios = steady(0.004, 0.04)
    assert grown(ratios, [1e-5 * (n + 1) for n in range(64)])[-1] is None
    assert grown(ratios, [math.nan] * 64)[-1] is not None


def test_unknown_ratios_are_left_out():
    """A step whose updates were not measured is no step of the line."""
    ratios = [each for ratio in steady(0.004, 0.04) for each in (ratio, math.nan)]
    assert [each is not None for each in grown(ratios)][-2:] == [True, False]


def test_a_loaded_state_goes_on():
    """Growth is found across a resume, also if the rates are unknown."""
    ratios, first = steady(0.004, 0.04), UpdateGrowth()
    for ratio in ratios[:40]:
        first.add(ratio, math.nan)
    later = UpdateGrowth()
    later.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert [later.add(ratio, 1e-3) for ratio in ratios[40:]][-1] is not None
