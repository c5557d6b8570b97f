"""Rewards that are the same for all answers to a prompt, or missing, teach nothing."""

import math

import pytest

from mfwrap.records.rewards import why_untaught

SAME = "all answers to each prompt got the same reward"
NONE = "no answer got a reward"


@pytest.mark.parametrize(
    ("logs", "why"),
    [
        ([], None),
        ([(1.0, 0.5), (1.0, 0.0)], SAME),
        ([(0.75, 0.5)], None),
        ([(1.0, 0.5), (0.75, 0.5), (1.0, 0.5)], None),
        ([(0.0, None), (0.0, math.nan)], NONE),
        ([(0.0, None), (1.0, 0.5)], SAME),
        ([(0.0, None), (0.0, 0.5)], None),
    ],
)
def test_why_rewards_teach_nothing(logs, why):
    """It is said only if it is so in every log."""
    assert why_untaught(logs) == why
