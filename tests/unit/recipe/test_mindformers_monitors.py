"""What a MindFormers file says of its monitors goes to them; what has no place is said."""

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
    """Return the sections of the recipe and the notes, after the recipe was found to be valid."""
    result = import_mindformers(text, "m.yaml")
    parse_recipe(result.text, "m.yaml", ["training.use_cpu=true"])
    return yaml.safe_load(result.text), result.notes


def test_curves_of_the_state_alone():
    """The monitor of the state gets the folder, too, where there is no monitor of the loss."""
    recipe, notes = imported(CURVES + STATE_MONITOR)

    assert recipe["monitor_config"]["tensorboard_dir"] == "curves"
    assert "tensorboard: without log_loss_scale_to_tensorboard" in notes


def test_keys_of_curves_without_a_place_are_said():
    """What the monitor of the loss does not take is named, an unknown key as well."""
    recipe, notes = imported(CURVES + LOSS_MONITOR)
    (monitor,) = recipe["callbacks"]

    assert monitor == {
        "type": "MFLossMonitor",
        "tensorboard_dir": "curves",
        "log_loss_scale_to_tensorboard": True,
    }
    without = ("tensorboard_queue_size", "log_expert_load_to_tensorboard", "foo")
    assert notes == [f"tensorboard: without {key}" for key in without]


@pytest.mark.parametrize(
    ("text", "note"),
    [
        (CURVES, "without tensorboard: no monitor is there that writes curves"),
        (
            CURVES + STATE_MONITOR.replace("True", "False"),
            "without tensorboard: no monitor is there that writes curves",
        ),
        ("tensorboard: {foo: 1}\n" + LOSS_MONITOR, "without tensorboard, which names no folder"),
        (CURVES + "  tensorboard_on: False\n" + LOSS_MONITOR, "without tensorboard, which is off"),
    ],
)
def test_curves_that_nobody_writes(text, note):
    """A section that nothing comes of is said to be left out, with the reason."""
    recipe, notes = imported(text)

    assert notes == [note]
    assert "curves" not in str(recipe)


def test_a_callback_keeps_its_own_folder():
    """A monitor of the state among the callbacks gets the folder, if it names none itself."""
    own = "{type: TrainingStateMonitor, tensorboard_dir: own}"
    recipe, _ = imported(CURVES + f"callbacks: [{own}, {{type: TrainingStateMonitor}}]\n")

    assert [one["tensorboard_dir"] for one in recipe["callbacks"]] == ["own", "curves"]
