"""Gradients of half-precision parameters can have float32."""

import torch
from torch import nn

from mfwrap.compatibility.gradient_dtypes import (
    HAS_GRADIENT_DTYPE,
    replace_gradient,
    set_gradient_dtype,
)
from support.versions import needs

pytestmark = needs("torch", "2.10", "Tensor.grad_dtype")


def test_later_gradients_have_the_dtype():
    """Backward adds up in the dtype that was set: 256 + 1 is no number of bfloat16."""
    assert HAS_GRADIENT_DTYPE
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    set_gradient_dtype(parameter, torch.float32)

    for factor in (256.0, 1.0):
        (parameter * factor).sum().backward()

    assert parameter.grad.dtype == torch.float32
    assert parameter.grad == 257.0


def test_a_present_gradient_is_converted():
    """The gradient keeps its value, and later gradients are added to it."""
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    parameter.sum().backward()

    set_gradient_dtype(parameter, torch.float32)
    parameter.sum().backward()

    assert parameter.grad.dtype == torch.float32
    assert parameter.grad == 2.0


def test_a_gradient_is_replaced_by_one_of_another_dtype():
    """A float32 gradient can be replaced by one in the parameter's own dtype."""
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    set_gradient_dtype(parameter, torch.float32)
    parameter.sum().backward()

    replace_gradient(parameter, torch.full((1,), 3.0, dtype=torch.bfloat16))

    assert parameter.grad.dtype == torch.bfloat16
    assert parameter.grad == 3.0
