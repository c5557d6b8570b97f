"""Tasks in which the model answers prompts: what the Trainer gets."""

import pytest

from mfwrap.runner.preview import preview
from support.recipe_data import recipe_of

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_prompts_are_shown(json_lines):
    """The preview has the tokens of each prompt, and the columns that a reward may take."""
    reward = "reward.type=think_format_reward"
    data = json_lines([{"prompt": f"{n} and {n}?", "site": "web"} for n in range(16)])
    lines = preview(recipe_of("reward_tuning", data, reward, num_generations=2), 1)

    assert lines[0].startswith("row 1: prompt ")
    assert lines[2:] == ["  for the reward   site", ""]
