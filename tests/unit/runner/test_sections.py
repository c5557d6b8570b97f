"""MindFormers' keys without an effect in mfwrap are left out of the sections, with a warning."""

import pytest

from mfwrap.runner import RecipeWarning, parse_recipe
from support.recipe_texts import recipe_text


def test_keys_without_meaning_are_named_in_one_warning():
    """MindFormers keys without an effect are left out, with one warning for all."""
    monitor = {"type": "MFLossMonitor", "micro_batch_num": 4, "learning_rate": 0.1}
    text = recipe_text(
        callbacks=[monitor, {"type": "SummaryMonitor"}],
        monitor_config={"monitor_on": False, "dump_path": "./dump"},
        optimizer={"type": "AdamW", "swap": False},
    )
    with pytest.warns(RecipeWarning) as caught:
        recipe = parse_recipe(text, "r.yaml")

    (warning,) = caught
    named = [
        "optimizer.swap",
        "callbacks.0.micro_batch_num",
        "callbacks.0.learning_rate",
        "callbacks.1 (SummaryMonitor)",
        "monitor_config.dump_path",
    ]
    assert set(recipe.without_meaning) == set(named)
    assert all(name in str(warning.message) for name in named)
    assert len(recipe.make_callbacks) == 1
