"""MindFormers' section ``tensorboard`` sets keys of monitors; a note names each unused key."""

import pytest
import yaml

from mfwrap.recipe import parse_recipe
from mfwrap.recipe.mindformers import import_mindformers

CURVES = """
tensorboard:
  tensorboard_dir: curves
  tensorboard_queue_size: 10
  log_loss_scale_to_tensorboard: True
  log_expert_load_to_tensorboard: False
  foo: 1
"""
LOSS_MONITOR = "callbacks: [{type: MFLossMonitor}]\n"
STATE_MONITOR = "monitor_config: {monitor_on: True, device_local_norm_format: tensorboard}\n"


def imported(text):
    """Return the sections and the notes of a file, after the recipe was checked."""
    result = import_mindformers(text, "m.yaml")
    parse_recipe(result.text, "m.yaml", ["training.use_cpu=true"])
    return yaml.safe_load(result.text), result.notes


def test_curves_of_the_state_alone():
    """The training-state monitor gets the folder even without a loss monitor."""
    recipe, notes = imported(CURVES + STATE_MONITOR)

    assert recipe["monitor_config"]["tensorboard_dir"] == "curves"
    assert "tensorboard.log_loss_scale_to_tensorboard: left out" in notes


def test_keys_that_no_monitor_has_are_noted():
    """Keys that the loss monitor does not have are left out with a note each."""
    recipe, notes = imported(CURVES + LOSS_MONITOR)
    (monitor,) = recipe["callbacks"]

    assert monitor == {
        "type": "MFLossMonitor",
        "tensorboard_dir": "curves",
        "log_loss_scale_to_tensorboard": True,
    }
    without = ("tensorboard_queue_size", "log_expert_load_to_tensorboard", "foo")
    assert notes == [f"tensorboard.{key}: left out" for key in without]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (CURVES, "tensorboard: left out, because no monitor writes to it"),
        (
            CURVES + STATE_MONITOR.replace("True", "False"),
            "tensorboard: left out, because no monitor writes to it",
        ),
        (
            "tensorboard: {foo: 1}\n" + LOSS_MONITOR,
            "tensorboard: left out, because it has no tensorboard_dir",
        ),
        (
            CURVES + "  tensorboard_on: False\n" + LOSS_MONITOR,
            "tensorboard: left out, because tensorboard_on is false",
        ),
    ],
)
def test_an_unused_section_is_noted(text, note):
    """A section without effect is left out with a note that gives the reason."""
    recipe, notes = imported(text)

    assert notes == [note]
    assert "curves" not in str(recipe)


def test_a_callback_keeps_its_own_folder():
    """A callback's own ``tensorboard_dir`` takes precedence."""
    own = "{type: TrainingStateMonitor, tensorboard_dir: own}"
    recipe, _ = imported(CURVES + f"callbacks: [{own}, {{type: TrainingStateMonitor}}]\n")

    assert [one["tensorboard_dir"] for one in recipe["callbacks"]] == ["own", "curves"]
