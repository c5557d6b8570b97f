"""Clipping by norm and by value, compared with torch and the closed form."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.step.clipping import clip_by_global_norm, clip_by_value, clip_coefficient

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
FINITE = st.floats(-1e3, 1e3, width=32)


@given(st.floats(0, 2.0**60, width=32), st.floats(1e-3, 1e6) | st.just(math.inf))
def test_the_clip_coefficient_is_torchs(norm, max_norm):
    """The coefficient scales a gradient as torch's ``clip_grad_norm_`` does.

    Both computations round four times to float32, by 6e-8 each time: together 5e-7.
    """
    parameter = torch.nn.Parameter(torch.zeros(()))
    parameter.grad = torch.tensor(norm)
    torch.nn.utils.clip_grad_norm_([parameter], max_norm)

    coefficient = clip_coefficient(torch.tensor(norm), max_norm)
    torch.testing.assert_close(torch.tensor(norm) * coefficient, parameter.grad, rtol=5e-7, atol=0)


def test_a_norm_below_the_limit_is_not_clipped_at_all():
    """The coefficient of a norm below the limit is exactly 1."""
    assert clip_coefficient(torch.tensor(0.5), 1.0) == 1.0
    assert clip_coefficient(torch.tensor(1e18), math.inf) == 1.0


@given(st.lists(st.lists(FINITE, min_size=1), min_size=1, max_size=4), st.floats(0.01, 1e4))
def test_clip_by_global_norm_is_the_closed_form(values, clip_norm):
    """Results agree with ``x * clip_norm / max(global_norm, clip_norm)`` to 2e-6."""
    tensors = [torch.tensor(row) for row in values]
    norm = torch.cat([tensor.double() for tensor in tensors]).norm()
    clipped = clip_by_global_norm(tensors, clip_norm)

    for tensor, result in zip(tensors, clipped, strict=True):
        expected = tensor.double() * clip_norm / max(norm, clip_norm)
        torch.testing.assert_close(result.double(), expected, rtol=2e-6, atol=1e-30)


def test_clip_by_global_norm_clips_to_one_by_default():
    """The default norm is 1, as in MindSpore."""
    [clipped] = clip_by_global_norm([torch.tensor([3.0, 4.0])])

    torch.testing.assert_close(clipped, torch.tensor([0.6, 0.8]))


def test_clip_by_global_norm_agrees_with_torch():
    """Results agree with torch's ``clip_grad_norm_``."""
    parameters = [torch.nn.Parameter(torch.zeros(20)) for _ in range(3)]
    for parameter in parameters:
        parameter.grad = torch.randn(20) * 1000
    clipped = clip_by_global_norm([p.grad.clone() for p in parameters], 2.5)
    torch.nn.utils.clip_grad_norm_(parameters, 2.5)

    for parameter, result in zip(parameters, clipped, strict=True):
        torch.testing.assert_close(result, parameter.grad)


@pytest.mark.parametrize("kind", [list, tuple])
def test_clip_by_global_norm_keeps_types_container_and_inputs(kind):
    """New tensors of the same dtypes are returned in the same kind of container."""
    tensors = [torch.full((4,), 100.0, dtype=dtype) for dtype in DTYPES]
    clipped = clip_by_global_norm(kind(tensors), 1.0)

    assert type(clipped) is kind
    assert [tensor.dtype for tensor in clipped] == DTYPES
    assert all((tensor == 100).all() for tensor in tensors)
    assert all((tensor < 1).all() for tensor in clipped)


def test_clip_by_global_norm_rounds_bfloat16_once():
    """The factor is applied in float32, and only the result is rounded to bfloat16."""
    tensor = torch.randn(1000).bfloat16()
    clipped = clip_by_global_norm([tensor], 1.0)[0]

    assert torch.equal(clipped, (tensor.double() / tensor.double().norm()).bfloat16())


def test_clip_by_global_norm_leaves_what_is_below_the_limit():
    """Tensors whose norm is at or below the limit are not changed."""
    tensor = torch.tensor([3.0, 4.0])

    assert torch.equal(clip_by_global_norm([tensor], 5.0)[0], tensor)
    assert torch.equal(clip_by_global_norm([tensor], 100)[0], tensor)


def test_clip_by_global_norm_with_a_norm_that_is_not_finite():
    """An infinite norm turns finite elements into 0 and inf into NaN; a NaN norm clips nothing."""
    infinite = clip_by_global_norm([torch.tensor([1.0, math.inf])])[0]
    undefined = clip_by_global_norm([torch.tensor([1.0, math.nan])])[0]

    torch.testing.assert_close(infinite, torch.tensor([0.0, math.nan]), equal_nan=True)
    torch.testing.assert_close(undefined, torch.tensor([1.0, math.nan]), equal_nan=True)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(2),), TypeError, "`x` must be a list or tuple of tensors"),
        (([1.0, 2.0],), TypeError, "`x` must be a list or tuple of tensors, got a list of"),
        (([],), ValueError, "`x` must hold at least one tensor"),
        (([torch.ones(2)], "1"), TypeError, "`clip_norm` must be a number"),
        (([torch.ones(2)], 0), ValueError, "`clip_norm` must be > 0"),
        (([torch.ones(2)], math.nan), ValueError, "`clip_norm` must be > 0"),
        (([torch.ones(2)], 1.0, 2.0), ValueError, "`use_norm` must be None"),
    ],
    ids=["tensor", "numbers", "empty", "string", "zero", "nan", "use_norm"],
)
def test_clip_by_global_norm_refuses_bad_arguments(arguments, error, message):
    """The error names the invalid argument."""
    with pytest.raises(error, match=message):
        clip_by_global_norm(*arguments)


BOUNDS = st.none() | FINITE


@given(st.lists(FINITE, min_size=1, max_size=20), BOUNDS, BOUNDS, st.booleans())
def test_clip_by_value_is_torchs_clamp(values, lowest, highest, as_tensors):
    """Results equal ``torch.clamp`` for bounds that are numbers, tensors or None."""
    if lowest is None and highest is None:
        lowest = 0.0
    tensor = torch.tensor(values)
    expected = torch.clamp(tensor, lowest, highest)
    if as_tensors and lowest is not None:
        lowest = torch.tensor(lowest)

    assert torch.equal(clip_by_value(tensor, lowest, highest), expected)


@pytest.mark.parametrize("kind", [list, tuple])
def test_clip_by_value_keeps_types_container_and_inputs(kind):
    """New tensors of the same dtypes are returned in the same kind of container."""
    tensors = [torch.tensor([-9.0, 0.5, 9.0], dtype=dtype) for dtype in DTYPES]
    clipped = clip_by_value(kind(tensors), torch.tensor(-1.0), 1)

    assert type(clipped) is kind
    assert [tensor.dtype for tensor in clipped] == DTYPES
    assert all(tensor.tolist() == [-1.0, 0.5, 1.0] for tensor in clipped)
    assert all(tensor[0] == -9 for tensor in tensors)


def test_clip_by_value_with_crossed_bounds_gives_the_upper():
    """Crossed bounds give the upper bound, as in MindSpore and torch."""
    assert clip_by_value(torch.tensor([0.0, 9.0]), 5.0, 1.0).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((torch.ones(2),), ValueError, "must not both be None"),
        ((torch.ones(2), "0"), TypeError, "`clip_value_min` must be a tensor, a number or None"),
        ((torch.ones(2), None, True), TypeError, "`clip_value_max` must be a tensor, a number"),
        ((3.0, 0.0), TypeError, "`x` must be a tensor, or a list or tuple of tensors, got 3.0"),
        (([1.0], 0.0), TypeError, r"`x` must be .* got a list of \['float'\]"),
    ],
    ids=["no bounds", "string", "bool", "number", "numbers"],
)
def test_clip_by_value_refuses_bad_arguments(arguments, error, message):
    """The error names the invalid argument."""
    with pytest.raises(error, match=message):
        clip_by_value(*arguments)
