"""The checks that stop a training, alone and in a real loop."""

import json
import math
import re

import pytest

from mfwrap import DynamicLossScaleUpdateCell
from mfwrap.callbacks import TrainingStateMonitor
from mfwrap.callbacks.shared.step_values import StepNumbers
from mfwrap.callbacks.training_state.checks import SpikeCount, SpikeGuard, check_finite
from support.spoilt.blocks import Fault, records_of, train_blocks

NAN, INF = math.nan, math.inf


def numbers(**values) -> StepNumbers:
    """Return the numbers of a healthy step, with some of them replaced."""
    fine = {
        "step": 3,
        "loss": 1.0,
        "overflow": False,
        "global_norm": 2.0,
        "loss_scale": 1.0,
        "skipped": False,
        "consecutive_skips": 0,
    }
    return StepNumbers(**fine | values)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"loss": NAN}, "the training stops: the loss of step 3 is nan"),
        ({"loss": INF}, "the loss of step 3 is inf"),
        ({"global_norm": INF, "overflow": True}, "the global norm of step 3 is inf"),
        ({"global_norm": None, "overflow": True}, "the gradients of step 3 are not finite"),
    ],
)
def test_what_is_not_finite(values, message):
    """A non-finite number raises an error with its name and step; finite numbers pass."""
    check_finite(numbers())
    check_finite(numbers(global_norm=None))
    with pytest.raises(ValueError, match=re.escape(message)):
        check_finite(numbers(**values))


def test_a_training_ends_at_a_nan(tmp_path):
    """A nan stops the training before the next update, and the anomaly is recorded."""
    monitor = TrainingStateMonitor(check_for_nan_in_loss_and_grad=True, folder=tmp_path)
    with pytest.raises(ValueError, match="the loss of step 5 is nan"):
        train_blocks(monitor, [Fault(5, "activation")], num_steps=9)

    assert [record["step"] for record in records_of(tmp_path)] == [5]


def test_an_ordinary_overflow_does_not_end_a_training(tmp_path):
    """Overflows by which a dynamic loss scale finds its value do not stop the training."""
    monitor = TrainingStateMonitor(check_for_nan_in_loss_and_grad=True, folder=tmp_path)
    scale = DynamicLossScaleUpdateCell(2.0**70, 2, 100)
    train_blocks(monitor, num_steps=9, scale=scale)

    assert monitor.num_scale_overflows > 3


def test_a_spike_ends_a_training_once(tmp_path):
    """A second run ignores a spike at the same step; the file has the norms of both runs."""
    settings = {
        "check_for_global_norm": True,
        "global_norm_spike_threshold": 1e3,
        "find_culprit": False,
    }
    fault = Fault(4, "blow-up", block=1)
    with pytest.raises(RuntimeError, match=r"`global_norm` of step 4 must be < 1000.0, got \d+"):
        train_blocks(TrainingStateMonitor(folder=tmp_path, **settings), [fault], num_steps=4)
    train_blocks(TrainingStateMonitor(folder=tmp_path, **settings), [fault], num_steps=4)
    norms = json.loads((tmp_path / "abnormal_global_norm.json").read_text())

    assert list(norms) == ["4"]
    assert len(norms["4"]) == 2
    assert norms["4"][0] == norms["4"][1] > 1e3


def test_a_norm_at_the_threshold_is_a_spike(tmp_path, caplog):
    """A norm equal to the threshold is a spike; a second spike at the same step is only logged."""
    guard = SpikeGuard(3.0, tmp_path, writes=False)
    guard.check(1, 2.999)
    for step in (2, 3):
        with pytest.raises(RuntimeError, match=f"of step {step} must be < 3.0, got 3.0"):
            guard.check(step, 3.0)
    guard.check(2, NAN)

    assert [r.getMessage() for r in caplog.records] == [
        ("The global norm nan of step 2 has reached the threshold 3.0 again; training continues.")
    ]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("content", ["", "{", "[]", '{"4": 1.0}', '{"4": ["x"]}', '{"a": []}'])
def test_a_damaged_file_of_spikes(tmp_path, content):
    """A file that cannot be read is refused by name."""
    path = tmp_path / "abnormal_global_norm.json"
    path.write_text(content, encoding="utf-8")

    with pytest.raises(ValueError, match=f"earlier runs: {path} is damaged; delete this file$"):
        SpikeGuard(3.0, tmp_path, writes=False)


def test_spikes_in_a_row(caplog):
    """A norm below the threshold resets the count; nan counts as a spike; the count is saved."""
    count = SpikeCount(2.5, 3)
    for step, norm in enumerate([3.0, NAN, 1.0, 2.5, 3.0], start=1):
        count.check(step, norm)
    assert count.state_dict() == {"num_in_a_row": 2}
    later = SpikeCount(2.5, 3)
    later.load_state_dict(count.state_dict())
    message = (
        "the training stops: the global norm has reached the threshold 2.5 in 3 consecutive "
        "steps, last in step 6 with 3.0"
    )
    with pytest.raises(ValueError, match=re.escape(message)):
        later.check(6, 3.0)


def test_skipped_spikes_end_a_training(tmp_path):
    """Three spikes in a row stop the training of a real loop."""
    monitor = TrainingStateMonitor(
        folder=tmp_path,
        use_skip_data_by_global_norm=True,
        global_norm_spike_threshold=1e3,
        global_norm_spike_count_threshold=3,
    )
    with pytest.raises(ValueError, match="in 3 consecutive steps, last in step 7 with"):
        train_blocks(monitor, [Fault(5, "blow-up", block=2)], num_steps=12)
