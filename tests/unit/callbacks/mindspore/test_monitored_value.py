"""The value that a callback monitors, and when it has improved."""

import math
import re
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfwrap import StepOutput
from mfwrap.callbacks import EarlyStopping
from mfwrap.callbacks.mindspore.monitored_value import (
    Improvement,
    loss_of,
    watched_value,
)
from mfwrap.model import CallbackParameters, RunContext

LOSS, OTHER = torch.tensor([1.0, 3.0]), torch.tensor(7.0)


@pytest.mark.parametrize(
    ("outputs", "loss"),
    [
        (LOSS, LOSS),
        ((LOSS, OTHER), LOSS),
        ([LOSS], LOSS),
        (StepOutput(LOSS, OTHER, OTHER, OTHER, None), LOSS),
        (SimpleNamespace(logits=OTHER, loss=LOSS), LOSS),
        ((), None),
        (None, None),
        (("loss", OTHER), None),
        ({"loss": LOSS}, None),
    ],
)
def test_the_loss_in_an_output(outputs, loss):
    """The loss is the tensor itself, an attribute `loss`, or the first entry of a tuple."""
    assert loss_of(outputs) is loss


@pytest.mark.parametrize(
    ("known", "monitor", "value"),
    [
        ({"metrics": {"F1": 0.5}}, "F1", 0.5),
        ({"metrics": {"eval_F1": 0.5}}, "F1", 0.5),
        ({"metrics": {}, "eval_results": {"F1": 0.25}}, "F1", 0.25),
        ({"metrics": {"F1": 0.5}, "eval_results": {"F1": 0.25}}, "F1", 0.5),
        ({"metrics": {"F1": torch.tensor([0.5])}}, "F1", 0.5),
        ({"metrics": {"loss": 4.0}, "net_outputs": LOSS}, "loss", 4.0),
        ({"net_outputs": LOSS}, "loss", 2.0),
        ({"net_outputs": LOSS}, "F1", None),
        ({"eval_results": {"F1": 0.25}}, "F1", None),
        ({"net_outputs": None}, "loss", None),
    ],
)
def test_the_value_of_an_epoch(known, monitor, value):
    """A metric of this epoch has priority; otherwise "loss" is the mean of the last step's loss."""
    assert watched_value(CallbackParameters(known), monitor) == value


@pytest.mark.parametrize("metric", [torch.ones(2), "high", True])
def test_a_metric_that_is_not_a_number(metric):
    """The error names the metric and its value."""
    with pytest.raises(TypeError, match=re.escape("a single number, got F1 = ")):
        watched_value(CallbackParameters({"metrics": {"F1": metric}}), "F1")


def test_an_unknown_value_is_logged_with_the_callback(caplog):
    """The warning names the class of the callback, the epoch and the unknown value."""
    known = CallbackParameters({"cur_epoch_num": 3})

    EarlyStopping("F1").on_evaluation(RunContext(known))

    assert caplog.messages == ["EarlyStopping ignores epoch 3: it has no value for `F1`"]


@given(
    value=st.floats(-10, 10),
    best=st.floats(-10, 10) | st.just(math.inf),
    min_delta=st.floats(0, 3),
)
def test_an_improvement_exceeds_the_best_value_by_more_than_min_delta(value, best, min_delta):
    """An improvement exceeds `min_delta`; ``"max"`` mirrors ``"min"``; NaN never improves."""
    falls, rises = Improvement("F1", "min", min_delta), Improvement("F1", "max", min_delta)

    assert falls.improves(value, best) == (value < best - min_delta)
    assert rises.improves(-value, -best) == falls.improves(value, best)
    assert not falls.improves(math.nan, best)
    assert falls.improves(value, falls.worst)
    assert rises.improves(value, rises.worst)


@pytest.mark.parametrize(
    ("monitor", "is_downward"),
    [("loss", True), ("eval_loss", True), ("mse", True), ("eval_F1", False), ("loss_ratio", False)],
)
def test_auto_knows_losses_and_errors(monitor, is_downward):
    """With ``"auto"``, a smaller value is better for losses and errors only."""
    assert Improvement(monitor, "auto", 0).is_downward is is_downward


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ((3, "min", 0), TypeError, "`monitor` must be a str, got 3"),
        (("loss", "down", 0), ValueError, "`mode` must be one of"),
        (("loss", "min", "1"), TypeError, "`min_delta` must be a number"),
        (("loss", "min", -1), ValueError, "`min_delta` must be >= 0 and finite, got -1"),
        (("loss", "min", math.inf), ValueError, "`min_delta` must be >= 0 and finite, got inf"),
    ],
)
def test_bad_settings_are_refused_by_name(settings, error, message):
    """A wrong setting raises an error that names the setting."""
    with pytest.raises(error, match=message):
        Improvement(*settings)
