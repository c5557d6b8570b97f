"""The training step's rule for clipping, and MindSpore's two clipping functions."""

from typing import TypeVar

import torch
from torch import Tensor

from mfwrap.arguments import described
from mfwrap.tensors.sharded_norms import square_of_all
from mfwrap.tensors.shards import on_device

_TensorSequence = TypeVar("_TensorSequence", list[Tensor], tuple[Tensor, ...])
_Tensors = TypeVar("_Tensors", Tensor, list[Tensor], tuple[Tensor, ...])


def clip_coefficient(global_norm: Tensor, max_norm: float) -> Tensor:
    """Return ``min(1, max_norm / (global_norm + 1e-6))``, the rule of torch's ``clip_grad_norm_``.

    Args:
        global_norm: Norm of all gradients, shape ``()``.
        max_norm: Largest norm, > 0; ``inf`` never clips.
    """
    return (max_norm / (global_norm + 1e-6)).clamp(max=1.0)


def clipped_divisor(divisor: Tensor | None, coefficient: Tensor | None) -> Tensor | None:
    """Return the number by which gradients are divided that are clipped at the same time.

    Args:
        divisor: Divisor of the gradients, shape ``()``; ``None`` for 1.
        coefficient: Factor that clips them, shape ``()``; ``None`` for 1.
    """
    if coefficient is None:
        return divisor
    return coefficient.reciprocal() if divisor is None else divisor / coefficient


def clip_by_global_norm(
    x: _TensorSequence, clip_norm: float = 1.0, use_norm: None = None
) -> _TensorSequence:
    """Scale tensors so that their global L2 norm is at most `clip_norm`.

    The result is ``x * clip_norm / max(global_norm, clip_norm)``. Unlike the training step, this
    does not add 1e-6 to the norm.

    Source: MindSpore, ``ops.clip_by_global_norm``.

    Args:
        x: Tensors of any floating dtype; not changed.
        clip_norm: Largest norm, > 0.
        use_norm: Must be ``None``, as in MindSpore.

    Returns:
        New tensors with the dtypes of `x`, in a container of the same kind. If the norm is
        infinite, finite elements become 0 and infinite elements become nan. If the norm is nan,
        all elements keep their values. Does not synchronize with the device.

    Raises:
        TypeError: If `x` is not a list or tuple of tensors, or `clip_norm` is not a number.
        ValueError: If `x` is empty, `clip_norm` <= 0, or `use_norm` is given.

    Example:
        >>> clip_by_global_norm((torch.tensor([3.0, 4.0]),), 1.0)
        (tensor([0.6000, 0.8000]),)
    """
    if not isinstance(x, (list, tuple)) or not all(isinstance(t, Tensor) for t in x):
        msg = f"`x` must be a list or tuple of tensors, got {_kind(x)}"
        raise TypeError(msg)
    if not isinstance(clip_norm, (int, float)):
        msg = f"`clip_norm` must be a number, got {described(clip_norm)}"
        raise TypeError(msg)
    if not x:
        msg = "`x` must hold at least one tensor, got none"
        raise ValueError(msg)
    if not clip_norm > 0:
        msg = f"`clip_norm` must be > 0, got {clip_norm}"
        raise ValueError(msg)
    if use_norm is not None:
        msg = f"`use_norm` must be None, got {use_norm!r}"
        raise ValueError(msg)
    norm = square_of_all(x, x[0].device).sqrt()
    # Do not use `maximum`, which would turn a nan norm into a nan factor.
    factor = clip_norm / torch.where(norm > clip_norm, norm, float(clip_norm))
    clipped = [(tensor * on_device(factor, tensor.device)).to(tensor.dtype) for tensor in x]
    return clipped if isinstance(x, list) else tuple(clipped)


def clip_by_value(
    x: _Tensors,
    clip_value_min: Tensor | float | None = None,
    clip_value_max: Tensor | float | None = None,
) -> _Tensors:
    """Clamp each element into a range.

    Source: MindSpore, ``ops.clip_by_value``.

    Args:
        x: A tensor, or a list or tuple of tensors; not changed.
        clip_value_min: Lower bound; ``None`` for no lower bound.
        clip_value_max: Upper bound; ``None`` for no upper bound. If it is below `clip_value_min`,
            every element becomes `clip_value_max`.

    Returns:
        New tensors with the shapes and dtypes of `x`, in a container of the same kind.

    Raises:
        TypeError: If `x` or a bound has the wrong type.
        ValueError: If both bounds are ``None``.

    Example:
        >>> clip_by_value(torch.tensor([-2.0, 0.5, 9.0]), -1.0, 1.0)
        tensor([-1.0000,  0.5000,  1.0000])
    """
    for name, bound in (("clip_value_min", clip_value_min), ("clip_value_max", clip_value_max)):
        if isinstance(bound, bool) or not isinstance(bound, (Tensor, int, float, type(None))):
            msg = f"`{name}` must be a tensor, a number or None, got {described(bound)}"
            raise TypeError(msg)
    if clip_value_min is None and clip_value_max is None:
        msg = "`clip_value_min` and `clip_value_max` must not both be None"
        raise ValueError(msg)
    if isinstance(x, Tensor):
        return _clamped(x, clip_value_min, clip_value_max)
    if not isinstance(x, (list, tuple)) or not all(isinstance(t, Tensor) for t in x):
        msg = f"`x` must be a tensor, or a list or tuple of tensors, got {_kind(x)}"
        raise TypeError(msg)
    clamped = [_clamped(tensor, clip_value_min, clip_value_max) for tensor in x]
    return clamped if isinstance(x, list) else tuple(clamped)


def _clamped(x: Tensor, lowest: Tensor | float | None, highest: Tensor | float | None) -> Tensor:
    # Two calls, because torch.clamp does not take a tensor together with a number.
    above = x if lowest is None else torch.clamp(x, min=lowest)
    return (above if highest is None else torch.clamp(above, max=highest)).to(x.dtype)


def _kind(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {sorted({type(v).__name__ for v in value})}"
    return described(value)
