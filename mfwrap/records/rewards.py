"""Tell from the log of a training by rewards whether these have taught the model anything."""

import math
import re
from collections.abc import Iterable, Mapping
from statistics import fmean
from typing import Any

REWARD = "reward"
"""Mean reward of the answers since the log before, in the log of TRL's trainers that generate."""

ALIKE = "frac_reward_zero_std"
"""Share of prompts whose answers all have the same reward, in the same log."""

REWARD_MEAN = re.compile(r"rewards/([^/]+)/mean")
"""Name in the same log of the mean of one of several rewards."""

_ROUNDING = 1e-6
"""Largest ratio of the deviation of equal rewards, which are float32, to their mean."""

_FEWEST, _MOST = 3, 0.9
"""Smallest number of logs, and smallest share of prompts, of which something is said of rewards
that teach nothing any more."""

FEW = 5
"""Number of logs after which something is said of rewards that have taught nothing."""


def why_untaught(logs: Iterable[tuple[float, float | None]]) -> str | None:
    """Return why rewards have taught nothing in any log; ``None`` if they have, or without logs.

    The answers to a prompt are compared with each other, so they teach nothing if all of them have
    the same reward, or none. In the logs after the first ones this is no fault: the model may have
    learned what the reward asks for.

    Args:
        logs: Share of prompts whose answers are alike, and mean reward, in each log of the training
            from its start. The reward is ``None`` or NaN if no answer has got one.
    """
    found = [(alike, None if one is None or math.isnan(one) else one) for alike, one in logs]
    if not found or any(alike < 1 and one is not None for alike, one in found):
        return None
    if any(one is not None for _, one in found):
        return "all answers to each prompt got the same reward"
    return "no answer got a reward"


def since_when_untaught(logs: Iterable[tuple[int, float, float | None]]) -> str | None:
    """Say since when rewards have taught nothing, if the model has become worse; else ``None``.

    It is said of three logs or more at the end in which the answers to nine of ten prompts, or of
    more, had the same reward, with a mean below half of that in the logs before. A model that has
    learned what the reward asks for has a higher one.

    Args:
        logs: Step, share of prompts whose answers are alike, and mean reward, in each log of the
            training from its start. The reward is ``None`` or NaN if no answer has got one.
    """
    known = [each for each in logs if each[2] is not None and not math.isnan(each[2])]
    last = max((at for at, (_, alike, _) in enumerate(known) if alike < _MOST), default=-1)
    before, since = known[: last + 1], known[last + 1 :]
    if not before or len(since) < _FEWEST:
        return None
    usual, now = (fmean(float(reward or 0) for *_, reward in part) for part in (before, since))
    if now >= usual - abs(usual) / 2:
        return None
    return (
        f"since step {since[0][0]}, all answers to nearly each prompt have got the same reward, "
        f"{now:.4g} in the mean, after {usual:.4g} before"
    )


def constant_rewards(logs: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return which of several rewards were the same number for all answers, as ``correct (0)``.

    Args:
        logs: Means and deviations of the rewards in each log of the training from its start, by
            TRL's names. A reward that has judged no answer in a log is none of them.
    """
    found: dict[str, set[float | None]] = {}
    for log in logs:
        for match in filter(None, map(REWARD_MEAN.fullmatch, log)):
            found.setdefault(match[1], set()).add(_constant(log, match[1]))
    if len(found) < 2:
        return []
    return [
        f"{name} ({value:.4g})"
        for name, (value, *others) in found.items()
        if value is not None and not others
    ]


def is_constant(mean: float, deviation: float) -> bool:
    """Return whether numbers with this mean and standard deviation are all the same."""
    return math.isclose(mean + deviation, mean, rel_tol=_ROUNDING)


def _constant(log: Mapping[str, Any], name: str) -> float | None:
    mean, deviation = log[f"rewards/{name}/mean"], log.get(f"rewards/{name}/std")
    if mean is None or deviation is None or not is_constant(mean, deviation):
        return None
    return float(f"{mean:.6g}")
