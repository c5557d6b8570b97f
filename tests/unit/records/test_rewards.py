"""Rewards that are the same for all answers to a prompt, or missing, teach nothing."""

import math

import pytest

from mfwrap.records.rewards import constant_rewards, since_when_untaught, why_untaught

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


@pytest.mark.parametrize(
    ("logs", "since"),
    [
        ([(0.5, 0.2), (0.5, 0.4), *[(1.0, 0.1)] * 3], "since step 15, all answers to nearly each"),
        ([(0.5, 0.2), *[(1.0, 0.1)] * 2], None),
        ([(0.5, 0.3), (0.9, 0.1), (1.0, 0.1), (0.9, 0.1)], "since step 10, all answ"),
        ([(0.5, 0.3), *[(1.0, 0.2)] * 3], None),
        ([(0.5, -1.0), *[(1.0, -2.0)] * 3], "since step 10, all answ"),
        ([(0.5, -1.0), *[(1.0, -0.5)] * 3], None),
        ([(0.5, 0.2), *[(1.0, 1.0)] * 5], None),
        ([(0.5, 0.2), *[(1.0, 0.2)] * 5], None),
        ([(0.5, 0.2), *[(1.0, 0.1)] * 3, (0.75, 0.1)], None),
        ([(0.5, 0.2), (1.0, 0.1), (0.0, None), (1.0, 0.0), (1.0, 0.0)], "since step 10, all answ"),
        ([(1.0, 0.1)] * 5, None),
        ([], None),
    ],
)
def test_since_when_rewards_teach_nothing(logs, since):
    """It is said of a model that has become worse, and not of one that has learned the reward."""
    said = since_when_untaught((5 * n, *each) for n, each in enumerate(logs, start=1))

    assert (said or "").startswith(since or "")
    assert (said is None) == (since is None)
    if said is not None and since.startswith("since step 15"):
        assert said.endswith("have got the same reward, 0.1 in the mean, after 0.3 before")


def log(**rewards):
    """Return the entry of a log with the mean and the deviation of rewards."""
    return {
        f"rewards/{name}/{what}": value
        for name, pair in rewards.items()
        for what, value in zip(("mean", "std"), pair, strict=True)
    }


def test_one_of_several_rewards_that_is_always_the_same():
    """It is named with its number, whatever the others do; a single one is told otherwise."""
    never, rising = (0.0, 0.0), [(0.2, 0.1), (0.6, 0.1)]
    logs = [log(right=never, form=form, length=(0.3, 3e-8)) for form in rising]

    assert constant_rewards(logs) == ["right (0)", "length (0.3)"]
    assert constant_rewards([*logs, log(right=(0.1, 0.3), form=never, length=(0.4, 0.0))]) == []
    assert constant_rewards([log(right=never)]) == []
    assert constant_rewards([log(right=(math.nan, math.nan), form=rising[0])]) == []
    assert constant_rewards([log(right=(None, None), form=rising[0])]) == []
