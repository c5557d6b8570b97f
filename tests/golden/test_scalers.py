"""Loss-scale managers and scalers reproduce the numbers recorded from MindSpore."""

import builtins
from typing import Any

import pytest
import torch

from mfwrap import (
    DynamicLossScaleManager,
    DynamicLossScaler,
    FixedLossScaleManager,
    StaticLossScaler,
    all_finite,
)
from support.golden.traces import assert_same, cases, floats, parametrized, tensor


def given(case: dict, *names: str) -> dict[str, Any]:
    """Return the arguments that a recorded call passed: those that are not null."""
    return {name: case[name] for name in names if case[name] is not None}


def assert_update_cell(cell, recorded: dict | None) -> None:
    """Assert that an update cell has the recorded type and scale, or is None as recorded."""
    actual = cell and {"type": type(cell).__name__, "get_loss_scale": cell.get_loss_scale()}
    assert actual == recorded


@pytest.mark.parametrize("case", parametrized("fixed_loss_scale_manager"))
def test_fixed_loss_scale_manager(case):
    """The loss scale keeps its value and type, and the update cell is as recorded."""
    manager = FixedLossScaleManager(**given(case, "loss_scale", "drop_overflow_update"))

    assert manager.get_loss_scale() == case["get_loss_scale"]
    assert type(manager.get_loss_scale()).__name__ == case["get_loss_scale_type"]
    assert manager.get_drop_overflow_update() is case["get_drop_overflow_update"]
    assert_update_cell(manager.get_update_cell(), case["update_cell"])
    for index, expected in enumerate(case["loss_scale_after_updates"]):
        manager.update_loss_scale(index % 2 == 0)
        assert manager.get_loss_scale() == expected


def unrolled(runs: list[list[Any]]) -> list[Any]:
    """Decode a run-length encoding, given as pairs of value and count."""
    return [value for value, count in runs for _ in range(count)]


@pytest.mark.parametrize("case", parametrized("dynamic_loss_scale_manager"))
def test_dynamic_loss_scale_manager(case):
    """Every loss scale and its type, every error and the last counters are as recorded."""
    arguments = given(case, "init_loss_scale", "scale_factor", "scale_window")
    manager = DynamicLossScaleManager(**arguments)
    assert manager.get_loss_scale() == case["get_loss_scale"]["loss_scale"]
    assert manager.get_drop_overflow_update() is case["get_drop_overflow_update"]
    assert_update_cell(manager.get_update_cell(), case["update_cell"])
    expected = case["expected"]
    scales, raised = [], []
    for call, overflow in enumerate(unrolled(case["overflow_rle"])):
        try:
            manager.update_loss_scale(bool(overflow))
        except RuntimeError as error:
            raised.append((call, type(error)))
        scales.append(manager.get_loss_scale())

    assert scales == unrolled(expected["loss_scale_rle"])
    types = [type(scale).__name__ for scale in scales]
    assert types == unrolled(expected["loss_scale_type_rle"])
    assert raised == [(one["call"], getattr(builtins, one["type"])) for one in expected["raised"]]
    assert manager.bad_step == expected["bad_step_last"]
    assert manager.cur_iter == expected["cur_iter_last"]
    assert manager.last_overflow_iter == expected["last_overflow_iter_last"]


def test_a_run_of_errors_is_recorded():
    """At least one recorded run raises an error, so the test above compares errors."""
    recorded = cases("dynamic_loss_scale_manager").values()
    assert [one for case in recorded for one in case["expected"]["raised"]]


def nested(recorded: Any) -> Any:
    """Return a recorded input or output as tensors in nested tuples."""
    if isinstance(recorded, list):
        return tuple(nested(one) for one in recorded)
    if "dtype" in recorded:
        return tensor(recorded)
    ((kind, value),) = recorded.items()
    return tensor(value) if kind == "tensor" else tuple(nested(one) for one in value)


def assert_nested(actual: Any, expected: Any) -> None:
    """Assert equal structure, dtypes, shapes and numbers."""
    assert type(actual) is type(expected)
    if isinstance(expected, tuple):
        for one, other in zip(actual, expected, strict=True):
            assert_nested(one, other)
        return
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("direction", ["scale", "unscale"])
@pytest.mark.parametrize("case", parametrized("amp_scale_unscale"))
def test_scale_and_unscale(case, direction):
    """Every product equals the recorded one bit for bit, including overflow in float16."""
    if case["kind"] == "static":
        scaler = StaticLossScaler(case["scale_value"])
    else:
        scaler = DynamicLossScaler(case["scale_value"], scale_factor=2, scale_window=100)
    for item in case["items"]:
        inputs = nested(item["input"])
        assert_nested(getattr(scaler, direction)(inputs), nested(item[direction]))
    assert_same(scaler.scale_value, case["scale_value_after"])


@pytest.mark.parametrize(
    "case",
    [p for p in parametrized("amp_scale_unscale") if "adjust_returns" in p.values[0]],
)
def test_static_adjust(case):
    """`adjust` of a static scaler returns False and leaves the scale unchanged."""
    scaler = StaticLossScaler(case["scale_value"])
    returned = [{"bool": scaler.adjust(torch.full((), finite))} for finite in (True, False)]
    assert returned == case["adjust_returns"]
    assert_same(scaler.scale_value, case["scale_value_after_adjust"])


@pytest.mark.parametrize("kind", ["tensor", "bool"])
@pytest.mark.parametrize("case", parametrized("amp_dynamic_loss_scaler"))
def test_dynamic_loss_scaler(case, kind):
    """Every loss scale and counter equals the recorded value."""
    scaler = DynamicLossScaler(case["scale_value"], case["scale_factor"], case["scale_window"])
    scales, counters = [], []
    for finite in case["grads_finite"]:
        flag = bool(finite) if kind == "bool" else torch.full((), bool(finite))
        assert scaler.adjust(flag) is case["expected"]["returns_true"]
        scales.append(scaler.scale_value.item())
        counters.append(scaler.counter.item())

    assert torch.equal(floats(scales), floats(case["expected"]["scale_value"]))
    assert counters == case["expected"]["counter"]


@pytest.mark.parametrize("case", parametrized("amp_all_finite"))
def test_all_finite(case):
    """`all_finite` returns the recorded answer as a bool tensor of the recorded shape."""
    container = {"tuple": tuple, "list": list}[case["container"]]
    answer = all_finite(container(tensor(one) for one in case["input"]))

    assert answer.shape == tuple(case["result"]["shape"])
    assert answer.dtype == torch.bool
    assert answer.item() is case["expected"]
