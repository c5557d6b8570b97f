"""Norms and clipping agree with the numbers recorded from MindSpore and MindFormers."""

import pytest
import torch

from mfwrap import clip_by_global_norm
from mfwrap.step.clipping import clip_coefficient
from mfwrap.tensors.norms import sum_of_squares
from support.golden.traces import TOLERANCE, assert_same, parametrized, tensor

CPU = torch.device("cpu")


@pytest.mark.parametrize("case", parametrized("clip_by_global_norm"))
def test_clip_by_global_norm(case):
    """`clip_by_global_norm` returns MindSpore's values, dtypes, shapes and container."""
    gradients = [tensor(recorded) for recorded in case["input"]]
    ((container, recorded),) = case["expected"]["ok"].items()
    kind = {"tuple": tuple, "list": list}[container]
    clip_norm = [] if case["clip_norm"] is None else [case["clip_norm"]]

    clipped = clip_by_global_norm(kind(gradients), *clip_norm)

    assert type(clipped) is kind
    for actual, expected in zip(clipped, recorded, strict=True):
        assert_tensor(actual, expected["tensor"])


@pytest.mark.parametrize("case", parametrized("clip_by_global_norm"))
def test_clip_by_global_norm_leaves_its_input(case):
    """`clip_by_global_norm` does not change its input."""
    gradients = [tensor(recorded) for recorded in case["input"]]
    before = [gradient.clone() for gradient in gradients]
    clip_by_global_norm(gradients, 1e-3)
    for gradient, copy in zip(gradients, before, strict=True):
        torch.testing.assert_close(gradient, copy, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("case", parametrized("mf_local_norm"))
def test_local_norm(case):
    """Sums of squares accumulate in float32 for every dtype, as recorded."""
    gradients = [tensor(recorded) for recorded in case["input"]]
    sums, sizes = (part["tuple"] for part in case["expected"]["ok"]["tuple"])

    squares = sum_of_squares(gradients, CPU)

    assert squares.dtype == torch.float32
    for actual, expected in zip(squares, sums, strict=True):
        assert_same(actual, expected["tensor"]["data"], relative=TOLERANCE)
    assert [gradient.numel() for gradient in gradients] == [size["int"] for size in sizes]


@pytest.mark.parametrize("case", parametrized("mf_clip_grad_norm"))
def test_global_norm(case):
    """The global norm is as recorded, including infinity where a square overflows."""
    gradients = [tensor(recorded) for recorded in case["input"]]
    _, norm = case["expected"]["ok"]["tuple"]
    actual = sum_of_squares(gradients, CPU).sum().sqrt()
    # The recorded function squares float16 gradients in float16, so its norm has float16's
    # resolution. (MindFormers' cell passes only float32 gradients to it.)
    coarsest = max(torch.finfo(gradient.dtype).eps for gradient in gradients)
    assert_same(actual, norm["tensor"]["data"], relative=max(TOLERANCE, coarsest))


@pytest.mark.parametrize("case", parametrized("mf_clip_grad_norm", without={"mfclip_nan"}))
def test_clip_coefficient(case):
    """Gradients above the limit shrink as recorded; gradients up to the limit are unchanged."""
    gradients = [tensor(recorded) for recorded in case["input"]]
    clipped, _ = case["expected"]["ok"]["tuple"]
    norm = sum_of_squares(gradients, CPU).sum().sqrt()

    coefficient = clip_coefficient(norm, case["max_norm"])

    if norm + 1e-6 <= case["max_norm"]:
        # MindFormers shrinks these gradients by 1e-6 / max_norm; mfwrap leaves them unchanged.
        assert coefficient == 1
        return
    for gradient, expected in zip(gradients, clipped["tuple"], strict=True):
        assert_tensor(gradient * coefficient.to(gradient.dtype), expected["tensor"])


def test_clip_coefficient_of_a_nan_norm():
    """A nan norm gives a nan coefficient, which is never used because the update is skipped."""
    assert clip_coefficient(torch.tensor(float("nan")), 1.0).isnan()


def assert_tensor(actual, recorded):
    """Assert equal dtype and shape, and values within the tolerance or float16's resolution."""
    expected = tensor(recorded)
    assert (actual.dtype, actual.shape) == (expected.dtype, expected.shape)
    resolution = torch.finfo(expected.dtype).eps
    assert_same(actual, recorded["data"], relative=max(TOLERANCE, resolution))
