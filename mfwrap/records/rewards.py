"""Tell from the log of a training by rewards whether these have taught the model anything."""

import math
from collections.abc import Iterable

REWARD = "reward"
"""Mean reward of the answers since the log before, in the log of TRL's trainers that generate."""

ALIKE = "frac_reward_zero_std"
"""Share of prompts whose answers all have the same reward, in the same log."""

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
