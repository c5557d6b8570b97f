"""The sections ``callbacks`` and ``monitor_config`` build the callbacks of a run."""

import pytest

from mfwrap.callbacks import MFLossMonitor, TrainingStateMonitor
from mfwrap.runner.document import RecipeError
from support.recipe_texts import parsed


@pytest.mark.parametrize(
    "shown",
    [
        {"local_norm_format": ["log", "tensorboard"]},
        {"stable_rank_config": {"format": "tensorboard"}},
        {"stable_rank_config": {"format": ["log", "tensorboard"]}},
    ],
)
def test_curves_of_the_monitor_have_a_folder(shown):
    """Without a folder in the section, the curves go to the run folder."""
    recipe = parsed(monitor_config={"monitor_on": True} | shown)
    (make,) = recipe.make_callbacks

    assert isinstance(make(), TrainingStateMonitor)


def test_a_folder_of_curves_is_taken_as_it_is_written(tmp_path):
    """A folder in the section is used instead of the run folder."""
    names = {"tensorboard_dir": str(tmp_path / "curves"), "local_norm_format": "tensorboard"}
    recipe = parsed(monitor_config={"monitor_on": True} | names)
    (make,) = recipe.make_callbacks

    assert make.keywords["tensorboard_dir"] == str(tmp_path / "curves")


def test_callbacks_are_made_anew():
    """Each run gets new callbacks."""
    recipe = parsed(callbacks=[{"type": "MFLossMonitor", "per_print_times": 3}])
    (make,) = recipe.make_callbacks

    assert isinstance(make(), MFLossMonitor)
    assert make() is not make()


def test_a_callback_that_is_a_key_of_a_recipe():
    """The error for MindFormers' callback that moves biases of experts names the recipe's key."""
    says = "callbacks.0.type: TopkBiasBalanceCallback is no callback: write "
    says += "moe_router_bias_update_rate, with the rate, at the top of the recipe instead"

    with pytest.raises(RecipeError, match=says):
        parsed(callbacks=[{"type": "TopkBiasBalanceCallback"}])
