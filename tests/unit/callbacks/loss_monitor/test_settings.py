"""The loss monitor's settings, and its state in a checkpoint."""

import json
import math
import re

import pytest

from mfwrap.callbacks import MFLossMonitor
from support.monitored_loop import Loop, output, shown

NAN = math.nan


def test_a_saved_mean_continues(caplog):
    """A mean saved within an epoch continues after a resume and includes the pending step."""
    loop = Loop()
    loop.send("on_train_begin")
    loop.send("on_epoch_begin")
    loop.step(output(1.0))
    loop.step(output(2.0))
    saved = json.loads(json.dumps(loop.monitor.state()))

    later = Loop()
    later.monitor.saved_mean = saved["attributes"]["saved_mean"]
    later.state.global_step = 2
    later.send("on_train_begin")
    later.send("on_epoch_begin")
    later.step(output(6.0))
    later.send("on_epoch_begin")
    later.step(output(7.0))
    later.send("on_train_end")

    assert shown(caplog, r"loss:\[(.*?)\]")[2:] == ["6.000/3.000", "7.000/7.000"]


def test_a_saved_mean_of_another_step(caplog):
    """A saved mean is ignored if the run starts at another step than the step of the save."""
    loop = Loop()
    loop.send("on_train_begin")
    loop.step(output(100.0))
    loop.send("on_train_end")
    loop.state.global_step = 0
    loop.send("on_train_begin")
    loop.step(output(1.0))
    loop.send("on_train_end")

    assert shown(caplog, r"loss:\[ *(.*?)\]") == ["100.000/100.000", "1.000/1.000"]


def test_state_makes_the_same_monitor(tmp_path):
    """The saved state survives JSON, and a monitor made from it has the same settings."""
    monitor = MFLossMonitor(
        5, origin_epochs=2, dataset_size=3, flops_per_step=1e12, tensorboard_dir=tmp_path
    )
    state = json.loads(json.dumps(monitor.state()))

    assert MFLossMonitor.from_state(state)._settings == monitor._settings


def test_the_length_must_be_known():
    """The start of a loop of unknown length raises a ValueError."""
    loop = Loop(max_steps=0, epochs=0)
    with pytest.raises(ValueError, match=r"`state.max_steps` must be set"):
        loop.send("on_train_begin")


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"per_print_times": 0}, ValueError, "`per_print_times` must be >= 1, got 0"),
        ({"per_print_times": 1.5}, TypeError, "`per_print_times` must be an int, got 1.5"),
        ({"per_print_times": True}, TypeError, "`per_print_times` must be an int, got True"),
        ({"origin_epochs": 0}, ValueError, "`origin_epochs` must be >= 1, got 0"),
        ({"dataset_size": -1}, ValueError, "`dataset_size` must be >= 1, got -1"),
        ({"initial_epoch": -1}, ValueError, "`initial_epoch` must be >= 0, got -1"),
        ({"initial_step": "2"}, TypeError, "`initial_step` must be an int, got '2'"),
        ({"global_batch_size": -4}, ValueError, "`global_batch_size` must be >= 0, got -4"),
        ({"flops_per_step": 0.0}, ValueError, "`flops_per_step` must be > 0 and finite, got 0.0"),
        ({"flops_per_step": "1"}, TypeError, "`flops_per_step` must be a number, got '1'"),
        ({"flops_per_step": NAN}, ValueError, "`flops_per_step` must be > 0 and finite, got nan"),
        ({"count_flops": 1}, TypeError, "`count_flops` must be a bool, got 1"),
        ({"count_flops": True, "flops_per_step": 1.0}, ValueError, "`count_flops` must be False"),
        ({"peak_tflops": 1.0}, ValueError, "`peak_tflops` needs `flops_per_step` or"),
        ({"tensorboard_dir": 3}, TypeError, "`tensorboard_dir` must be a path or None, got 3"),
        (
            {"log_timers_to_tensorboard": True},
            ValueError,
            "`log_timers_to_tensorboard` must be False without `tensorboard_dir`",
        ),
        (
            {"log_loss_scale_to_tensorboard": True},
            ValueError,
            "`log_loss_scale_to_tensorboard` must be False without `tensorboard_dir`",
        ),
        ({"micro_batch_num": 2}, TypeError, "micro_batch_num"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_bad_arguments(settings, error, message):
    """A wrong argument raises an error with the argument's name and value."""
    with pytest.raises(error, match=re.escape(message)):
        MFLossMonitor(**settings)
