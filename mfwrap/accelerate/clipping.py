"""Clipping where the loop asks for it: measured at once, done by the optimizer's step."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from mfwrap.accelerate.optimizer_window import OptimizerWindow, multiply_in_place
from mfwrap.step.clipping import clip_coefficient
from mfwrap.tensors.sharded_norms import square_of_all
from mfwrap.tensors.shards import is_distributed

__all__ = ["clip_grad_norm", "clip_grad_value"]


def clip_grad_norm(
    windows: Sequence[OptimizerWindow],
    parameters: Iterable[Tensor],
    loss_scale: Tensor,
    *,
    max_norm: float,
    norm_type: float = 2.0,
    may_fold: bool = True,
) -> Tensor:
    """Clip unscaled gradients by their norm, as torch's ``clip_grad_norm_`` does.

    One read of the gradients gives the norm; the step's own pass does the clipping. For a part of
    an optimizer's gradients, another norm than L2, after they were unscaled, or where they may not
    be folded, they are clipped in place.

    Args:
        windows: Of all optimizers.
        parameters: Whose gradients.
        loss_scale: Shape ``()``, float32, on the training device.
        max_norm: Largest norm; ``inf`` only measures.
        norm_type: Which norm.
        may_fold: Whether no more gradients come before the step.

    Returns:
        Norm before clipping, shape ``()``; float32 for the L2 norm. Does not wait for the device.
    """
    gradients = {id(p): p.grad for p in parameters if p.grad is not None}
    if not gradients:
        return torch.zeros_like(loss_scale)
    concerned = [window for window in windows if window.update.parameters.among(gradients)]
    for window in concerned:
        window.settle_clip()
    folds = may_fold and norm_type == 2 and bool(concerned)
    for window in concerned:
        whole = window.update.parameters.all_with_gradient_among(gradients)
        folds = folds and whole and not window.is_unscaled
    # Inside a caller's autocast, products of norms would be taken in half precision.
    with torch.no_grad(), torch.autocast(loss_scale.device.type, enabled=False):
        if folds:
            return _fold(concerned, gradients, loss_scale, max_norm)
        return _clip_in_place(concerned, list(gradients.values()), loss_scale, max_norm, norm_type)


def _fold(
    windows: Sequence[OptimizerWindow],
    gradients: Mapping[int, Tensor],
    loss_scale: Tensor,
    max_norm: float,
) -> Tensor:
    measured = [window.measured() for window in windows]
    norm, overflow = measured[0].global_norm, measured[0].overflow
    in_windows = {id(g) for w in windows for g in w.update.parameters.present_gradients()}
    others = [g for g in gradients.values() if id(g) not in in_windows]
    if others or len(windows) > 1:
        norms = [measurement.global_norm for measurement in measured]
        if others:
            norms.append(square_of_all(others, loss_scale.device).sqrt() / loss_scale)
        norm = torch.linalg.vector_norm(torch.stack(norms))
        overflow = torch.stack([m.overflow for m in measured]).any() | ~norm.isfinite()
    coefficient = clip_coefficient(norm, max_norm)
    for window in windows:
        window.fold_clip(norm, overflow, coefficient)
    # No step clips those that no optimizer holds.
    multiply_in_place(others, coefficient)
    return norm


def _clip_in_place(
    windows: Sequence[OptimizerWindow],
    gradients: Sequence[Tensor],
    loss_scale: Tensor,
    max_norm: float,
    norm_type: float,
) -> Tensor:
    are_unscaled = any(window.is_unscaled for window in windows)
    for window in windows:
        if are_unscaled:
            window.unscale()
        window.note_overflow()
    if norm_type == 2:
        norm = square_of_all(gradients, loss_scale.device).sqrt()
    else:
        norm = torch.nn.utils.get_total_norm(list(gradients), norm_type)
        norm = norm.full_tensor() if is_distributed(norm) else norm
    if not are_unscaled:
        norm = norm / loss_scale
    multiply_in_place(gradients, clip_coefficient(norm, max_norm))
    for window in windows:
        window.accept_clipped()
    return norm


def clip_grad_value(
    windows: Sequence[OptimizerWindow], parameters: Iterable[Tensor], clip_value: float
) -> None:
    """Clamp the elements of unscaled gradients, in place.

    An overflow is noted before, because clamping hides it.

    Args:
        windows: Of all optimizers.
        parameters: Whose gradients.
        clip_value: Largest magnitude.
    """
    held = list(parameters)
    identities = {id(parameter) for parameter in held}
    concerned = [window for window in windows if window.update.parameters.among(identities)]
    for window in concerned:
        window.unscale()
        window.note_overflow()
    torch.nn.utils.clip_grad_value_(held, clip_value)
    for window in concerned:
        window.accept_clipped()
