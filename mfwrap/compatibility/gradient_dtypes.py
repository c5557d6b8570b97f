"""Dtype in which torch accumulates the gradient of a parameter: ``Tensor.grad_dtype``."""

import torch
from torch import Tensor

from mfwrap.compatibility.foreign import ForeignName

NAMES = (ForeignName("torch", "Tensor.grad_dtype", since="2.10"),)

HAS_GRADIENT_DTYPE = hasattr(Tensor, "grad_dtype")
"""Whether a gradient may have another dtype than its parameter.

Without it, ``parameter.grad_dtype = ...`` only sets a Python attribute, and changes nothing.
"""


def set_gradient_dtype(parameter: Tensor, dtype: torch.dtype) -> None:
    """Let a parameter's gradient have `dtype`, and convert a gradient that exists.

    Args:
        parameter: Leaf tensor.
        dtype: Dtype of the present gradient and of later ones.
    """
    gradient = parameter.grad
    if gradient is None:
        parameter.grad_dtype = dtype
    elif gradient.dtype != dtype:
        replace_gradient(parameter, gradient.to(dtype))


def replace_gradient(parameter: Tensor, gradient: Tensor) -> None:
    """Replace a parameter's gradient by one that may have another dtype.

    Args:
        parameter: Leaf tensor.
        gradient: New gradient; later gradients have its dtype.
    """
    # torch refuses another `grad_dtype` while there is a gradient.
    parameter.grad = None
    parameter.grad_dtype = gradient.dtype
    parameter.grad = gradient
