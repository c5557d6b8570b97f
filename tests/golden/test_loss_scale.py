"""The loss-scale update cells reproduce runs recorded from MindSpore and MindFormers."""

import pytest
import torch
from torch import Tensor

from mfwrap import (
    AdaptiveLossScaleUpdateCell,
    DynamicLossScaleUpdateCell,
    FixedLossScaleUpdateCell,
    LossScaleUpdateCell,
)
from support.golden.traces import assert_same, cases, parametrized

FIXED = "fixed_loss_scale_update_cell"
DYNAMIC = "dynamic_loss_scale_update_cell"
ADAPTIVE = "adaptive_loss_scale_update_cell"

INFINITE = frozenset(
    name
    for family in (DYNAMIC, ADAPTIVE)
    for name, case in cases(family).items()
    if "inf" in case["expected"]["loss_scale"]
)


def run(cell: LossScaleUpdateCell, overflows: list[int], shape: tuple[int, ...], dtype) -> dict:
    """Call a cell for each flag; return the loss scale, returned flag and counters of each call."""
    loss_scale = torch.full(shape, cell.get_loss_scale())
    states = []
    for overflow in overflows:
        flag = torch.full(shape, overflow, dtype=dtype)
        returned = cell(loss_scale, flag)
        state = {"loss_scale": loss_scale, "returned_overflow": returned, **cell.state_dict()}
        states.append({name: value.clone().reshape(()) for name, value in state.items()})
    return {name: torch.stack([state[name] for state in states]) for name in states[0]}


def assert_follows(actual: dict[str, Tensor], expected: dict[str, list]) -> None:
    """Assert that every quantity equals its recorded values."""
    for name, recorded in expected.items():
        assert_same(actual[name], recorded)


# mfwrap's steps pass the flag as a bool of shape (), MindSpore's as a number of shape (1,).
kinds = pytest.mark.parametrize(
    ("shape", "dtype"), [((), torch.bool), ((1,), torch.float32)], ids=["bool", "number"]
)


def test_infinite():
    """The cases whose recorded scale becomes infinite are the two in tests/golden/README.md."""
    assert {"dyn_grow_to_inf", "adaptive_09"} == INFINITE


@kinds
@pytest.mark.parametrize("case", parametrized(FIXED))
def test_fixed(case, shape, dtype):
    """The fixed cell keeps its loss scale and returns the flag."""
    cell = FixedLossScaleUpdateCell(case["loss_scale_value"])
    assert cell.get_loss_scale() == case["get_loss_scale"]
    assert_follows(run(cell, case["overflow"], shape, dtype), case["expected"])


@kinds
@pytest.mark.parametrize("case", parametrized(DYNAMIC, without=INFINITE))
def test_dynamic(case, shape, dtype):
    """Every loss scale and counter of the dynamic cell equals the recorded value."""
    cell = dynamic_cell(case)
    assert cell.get_loss_scale() == case["get_loss_scale"]
    assert_follows(run(cell, case["overflow"], shape, dtype), case["expected"])


@kinds
@pytest.mark.parametrize("case", parametrized(ADAPTIVE, without=INFINITE))
def test_adaptive(case, shape, dtype):
    """Every loss scale, window and counter of the adaptive cell equals the recorded value."""
    cell = adaptive_cell(case)
    assert list(cell.window_list) == case["window_list"]
    assert cell.state_dict() == case["initial_state"]
    assert_follows(run(cell, case["overflow"], shape, dtype), case["expected"])


def test_dynamic_growth_to_infinity_is_not_done():
    """The dynamic cell's scale stays at the largest finite value until an overflow halves it."""
    case = cases(DYNAMIC)["dyn_grow_to_inf"]
    actual = run(dynamic_cell(case), case["overflow"], (), torch.bool)
    exponents = [126, 127, 127, 127, 127, 127, 126, 125, 124, 123, 124, 125, 126]
    assert_follows(
        actual, case["expected"] | {"loss_scale": [2.0**exponent for exponent in exponents]}
    )


def test_adaptive_growth_to_infinity_is_not_done():
    """The adaptive cell's scale stays at its largest finite value until an overflow lowers it."""
    case = cases(ADAPTIVE)["adaptive_09"]
    finite = case["expected"]["loss_scale"].index("inf")
    actual = run(adaptive_cell(case), [*case["overflow"], 1], (), torch.bool)
    assert_follows(
        {name: values[:finite] for name, values in actual.items()},
        {name: values[:finite] for name, values in case["expected"].items()},
    )
    highest = case["expected"]["loss_scale"][finite - 1]
    assert actual["loss_scale"][finite:-1].tolist() == [highest] * (len(case["overflow"]) - finite)
    assert actual["loss_scale"][-1].item() == pytest.approx(highest / 10, rel=1e-6)


def dynamic_cell(case: dict) -> DynamicLossScaleUpdateCell:
    """Return the dynamic update cell of a case."""
    return DynamicLossScaleUpdateCell(
        case["loss_scale_value"], case["scale_factor"], case["scale_window"]
    )


def adaptive_cell(case: dict) -> AdaptiveLossScaleUpdateCell:
    """Return the adaptive update cell of a case."""
    return AdaptiveLossScaleUpdateCell(
        case["loss_scale_value"],
        case["scale_factor"],
        case["scale_window"],
        max_scale_window=case["max_scale_window"],
        min_scale_window=case["min_scale_window"],
    )
