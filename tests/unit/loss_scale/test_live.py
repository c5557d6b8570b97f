"""A live loss scale checks its arguments, and can be replaced, saved and restored."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mfwrap import DynamicLossScaleUpdateCell, FixedLossScaleUpdateCell, StepConfig
from mfwrap.loss_scale.live import LossScale
from mfwrap.step.losses import Accumulated
from mfwrap.step.parameters import TrainedParameters
from mfwrap.step.update import StepUpdate
from support.host_reads import HostReads

CPU = torch.device("cpu")
FLOAT32_MAX = torch.finfo(torch.float32).max


def overflow(*, found=True):
    """Return an overflow flag."""
    return torch.full((), found)


@given(st.floats(2.0**-126, FLOAT32_MAX) | st.integers(1, 2**127))
def test_a_number_becomes_a_float32_scalar(number):
    """An int or float in the range of float32 is rounded to float32."""
    scale = LossScale(number, CPU)

    assert (scale.value.shape, scale.value.dtype) == ((), torch.float32)
    assert torch.equal(scale.value, torch.tensor(number, dtype=torch.float64).float())
    assert scale.update_cell is None


@pytest.mark.parametrize(
    "tensor",
    [torch.tensor(8.0), torch.tensor([8.0]), torch.tensor(8), torch.tensor(8.0).half()],
    ids=["()", "(1,)", "int", "half"],
)
def test_a_tensor_of_one_element_is_copied(tensor):
    """A tensor of one element and any dtype is copied: changing it later has no effect."""
    scale = LossScale(tensor, CPU)
    tensor.fill_(2)

    assert torch.equal(scale.value, torch.tensor(8.0))


def test_an_update_cell_gives_the_initial_scale():
    """The scale starts at the cell's value, and the cell updates it in place."""
    scale = LossScale(DynamicLossScaleUpdateCell(8.0, 2, 1), CPU)
    live = scale.value
    flag = overflow()

    assert scale.update(flag) is flag
    assert scale.value is live
    assert live == 4.0


def test_without_an_update_cell_overflows_change_nothing():
    """Without an update cell the scale stays, and the flag is returned unchanged."""
    scale, flag = LossScale(8.0, CPU), overflow()

    assert scale.update(flag) is flag
    assert scale.value == 8.0


@pytest.mark.parametrize("scale_sense", ["8", [8.0], object(), None, DynamicLossScaleUpdateCell])
def test_anything_else_is_a_type_error(scale_sense):
    """A value that is not a number, tensor or cell raises MindSpore's exception type."""
    with pytest.raises(TypeError, match="`scale_sense` must be a number, a tensor"):
        LossScale(scale_sense, CPU)


@pytest.mark.parametrize("shape", [(2,), (1, 1), (0,)])
def test_a_tensor_of_another_shape_is_a_value_error(shape):
    """A shape other than ``()`` or ``(1,)`` raises MindSpore's exception type."""
    with pytest.raises(ValueError, match=r"`scale_sense` must have shape \(\) or \(1,\), got"):
        LossScale(torch.ones(shape), CPU)


BAD_NUMBERS = [0.0, -1.0, math.nan, math.inf, -math.inf, 1e39, 10**400]


@pytest.mark.parametrize("number", BAD_NUMBERS, ids=lambda number: f"{str(number)[:5]}")
def test_a_number_that_is_no_scale_is_a_value_error(number):
    """A number must be > 0 and finite in float32; any other number raises a ValueError."""
    with pytest.raises(ValueError, match="`scale_sense` must be > 0 and finite in float32"):
        LossScale(number, CPU)


@pytest.mark.parametrize("number", [0.0, -1.0, math.nan, math.inf])
def test_a_tensor_that_is_no_scale_is_a_value_error(number):
    """A tensor's value is checked like a number, at construction."""
    with pytest.raises(ValueError, match="`scale_sense` must be > 0 and finite in float32"):
        LossScale(torch.tensor(number), CPU)


@pytest.mark.parametrize(
    "scale_sense", [1e-50, FixedLossScaleUpdateCell(1e-50)], ids=["number", "cell"]
)
def test_a_scale_that_rounds_to_zero_is_a_value_error(scale_sense):
    """A scale that rounds to 0 in float32 is an error."""
    with pytest.raises(ValueError, match="`scale_sense` must be > 0 and finite in float32"):
        LossScale(scale_sense, CPU)


@pytest.mark.parametrize(
    ("scale_sense", "expected"),
    [
        (1, True),
        (1.0, True),
        (torch.tensor([1.0]), True),
        (2.0, False),
        (FixedLossScaleUpdateCell(1.0), False),
        (DynamicLossScaleUpdateCell(1.0, 2, 1), False),
    ],
    ids=["int", "float", "tensor", "two", "fixed", "dynamic"],
)
def test_is_one_tells_what_the_host_knows(scale_sense, expected):
    """`is_one` is True only for a scale of 1 without an update cell."""
    assert LossScale(scale_sense, CPU).is_one is expected


@pytest.mark.parametrize(
    "sens",
    [torch.tensor(32.0), torch.tensor([32]), torch.tensor(32.0, dtype=torch.float64)],
    ids=["()", "(1,) int", "float64"],
)
def test_set_replaces_the_scale_in_place(sens):
    """Setting the scale keeps its tensor and reads nothing on the host."""
    scale = LossScale(1.0, CPU)
    live = scale.value
    with HostReads() as host:
        scale.set(sens)

    assert host.reads == []
    assert scale.value is live
    assert torch.equal(live, torch.tensor(32.0))
    assert not scale.is_one


@pytest.mark.parametrize("sens", [32.0, 32, None, "32"])
def test_set_takes_a_tensor_only(sens):
    """An argument that is not a tensor raises MindSpore's exception type."""
    with pytest.raises(TypeError, match="`sens` must be a tensor, got"):
        LossScale(8.0, CPU).set(sens)


def test_set_refuses_another_shape():
    """`set` accepts only the shapes ``()`` and ``(1,)``."""
    with pytest.raises(ValueError, match=r"`sens` must have shape \(\) or \(1,\), got \(2,\)"):
        LossScale(8.0, CPU).set(torch.ones(2))


@pytest.mark.parametrize("use_clip_grad", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("sens", [0.0, -2.0, math.nan, math.inf, 1e-50])
def test_a_set_scale_that_is_no_scale_shows_as_overflow(sens, fused, use_clip_grad):
    """If the scale is set to a value <= 0 or non-finite in float32, the update is skipped."""
    network = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, fused=fused)
    parameters = TrainedParameters(dict(network.named_parameters()), optimizer, None)
    loss_scale = LossScale(8.0, CPU)
    update = StepUpdate(parameters, optimizer, StepConfig(use_clip_grad=use_clip_grad), loss_scale)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    loss_scale.set(torch.tensor(sens, dtype=torch.float64))
    loss = network(torch.ones(2, 3)).sum()
    (loss * loss_scale.value).backward()
    report = update(Accumulated(loss.detach(), None))

    assert report.output.overflow
    assert report.skipped
    for parameter, old in zip(network.parameters(), before, strict=True):
        assert torch.equal(parameter, old)


def dynamic():
    """Return a live scale with a dynamic update cell, which grows after two finite steps."""
    return LossScale(DynamicLossScaleUpdateCell(8.0, 2, 2), CPU)


def test_a_restored_scale_goes_on_as_the_saved_one():
    """After loading, the next growth comes at the step where it was due."""
    saved, restored = dynamic(), dynamic()
    saved.update(overflow())
    saved.update(overflow(found=False))
    restored.load_state_dict(saved.state_dict())
    restored.update(overflow(found=False))

    assert restored.value == 8.0
    assert saved.value == 4.0


def test_state_is_a_copy():
    """Later steps do not change a saved state."""
    scale = dynamic()
    state = scale.state_dict()
    scale.update(overflow())

    assert state["value"] == 8.0
    assert state["update_cell"]["cur_iter"] == 1


def test_loading_tells_whether_the_scale_is_one():
    """After loading, `is_one` describes the loaded scale."""
    one, two = LossScale(1.0, CPU), LossScale(2.0, CPU)
    states = one.state_dict(), two.state_dict()
    one.load_state_dict(states[1])
    two.load_state_dict(states[0])

    assert (one.is_one, two.is_one) == (False, True)


COUNTERS = DynamicLossScaleUpdateCell(8.0, 2, 2).state_dict()


@pytest.mark.parametrize(
    ("state", "error"),
    [
        ({}, KeyError),
        ({"value": torch.tensor(4.0)}, KeyError),
        ({"value": torch.tensor(4.0), "update_cell": COUNTERS, "scale": 1}, KeyError),
        ({"value": 4.0, "update_cell": COUNTERS}, TypeError),
        ({"value": torch.ones(2), "update_cell": COUNTERS}, ValueError),
        ({"value": torch.tensor(0.0), "update_cell": COUNTERS}, ValueError),
        ({"value": torch.tensor(math.inf), "update_cell": COUNTERS}, ValueError),
        ({"value": torch.tensor(4.0), "update_cell": {}}, KeyError),
        ({"value": torch.tensor(4.0), "update_cell": None}, TypeError),
        (None, TypeError),
        ({"value": torch.tensor(4.0), "update_cell": COUNTERS | {"cur_iter": 1}}, TypeError),
    ],
    ids=[
        "empty",
        "no cell",
        "unknown",
        "number",
        "shape",
        "zero",
        "inf",
        "no counters",
        "none",
        "nothing",
        "counter",
    ],
)
def test_a_foreign_state_is_refused_and_changes_nothing(state, error):
    """A state that does not fit is an error, and leaves the value and the counters unchanged."""
    scale = dynamic()
    scale.update(overflow())
    before = scale.state_dict()

    with pytest.raises(error):
        scale.load_state_dict(state)
    assert scale.state_dict() == before


def test_a_scale_without_a_cell_refuses_counters():
    """Loading the state of a dynamic scale into a fixed one is an error."""
    scale = LossScale(8.0, CPU)

    with pytest.raises(KeyError, match="of a fixed loss scale must not have counters"):
        scale.load_state_dict(dynamic().state_dict() | {"value": torch.tensor(4.0)})
    assert scale.value == 8.0


def test_the_cell_is_moved_to_the_scales_device():
    """The counters are on the device of the scale before the first step."""
    cell = DynamicLossScaleUpdateCell(8.0, 2, 2)
    LossScale(cell, torch.device("meta"))

    assert cell.cur_iter.device.type == "meta"


def test_a_bad_saved_scale_is_named_as_such():
    """The error names the entry of the state, not the argument `scale_sense`."""
    scale = dynamic()

    with pytest.raises(
        ValueError, match=r"`state_dict\['value'\]` must be > 0 and finite .* got 0"
    ):
        scale.load_state_dict(scale.state_dict() | {"value": torch.tensor(0.0)})
