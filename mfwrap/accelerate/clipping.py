"""Clip the gradients of a loop, in place of torch's ``clip_grad_norm_`` and ``clip_grad_value_``.

`clip_grad_norm` reads the gradients once to compute the norm that it returns to the loop, the local
norms and the overflow flag. It does not change the gradients: the step multiplies them by the clip
factor in its own pass ("the clip is folded").

A clip can be folded only if it uses the L2 norm, covers all gradients of the optimizer, comes after
the last micro-batch, and finds the gradients still scaled. Any other clip changes the gradients in
place, as torch does. Before a second clip, the folded clip is applied in place. See
`mfwrap.accelerate.window` for what a loop may do between a clip and the step.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from mfwrap.accelerate.window import Form, OptimizerWindow
from mfwrap.compatibility.torch import foreach_clamp_max_, foreach_clamp_min_
from mfwrap.step.clipping import clip_coefficient
from mfwrap.tensors.placements import place_gradients
from mfwrap.tensors.sharded_norms import norm_of_all, square_of_all
from mfwrap.tensors.shards import multiply_in_place, shards_by_device


def clip_grad_norm(
    windows: Sequence[OptimizerWindow],
    parameters: Iterable[Tensor] | Tensor,
    loss_scale: Tensor,
    *,
    max_norm: float,
    norm_type: float = 2.0,
    may_fold: bool = True,
) -> Tensor:
    """Clip unscaled gradients by their norm, as torch's ``clip_grad_norm_`` does.

    The clip is folded into the step if possible, and done in place otherwise.

    Args:
        windows: Windows of all optimizers.
        parameters: Parameters whose gradients are clipped, or one of them.
        loss_scale: Loss scale, shape ``()``, float32, on the training device.
        max_norm: Largest norm; with ``inf`` the norm is computed but nothing is clipped.
        norm_type: Order of the norm.
        may_fold: Whether the last backward before the step is done.

    Returns:
        Norm before clipping, shape ``()``; float32 for the L2 norm. Does not synchronize with the
        device.
    """
    held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    may_fold = may_fold and norm_type == 2
    if may_fold and len(windows) == 1 and windows[0].may_fold_clip_of(held):
        [window] = windows
        measured = window.measured()
        with torch.no_grad(), torch.autocast(loss_scale.device.type, enabled=False):
            coefficient = clip_coefficient(measured.global_norm, max_norm)
        window.fold_clip(measured, coefficient)
        return measured.global_norm
    place_gradients(held)
    gradients = {id(p): p.grad for p in held if p.grad is not None}
    if not gradients:
        return torch.zeros_like(loss_scale)
    concerned = [window for window in windows if window.update.parameters.among(gradients)]
    for window in concerned:
        window.settle_clip()
    folds = may_fold and bool(concerned)
    for window in concerned:
        whole = window.update.parameters.all_with_gradient_among(gradients)
        folds = folds and whole and window.form is not Form.UNSCALED
    # Disable a caller's autocast, which would multiply norms in half precision.
    with torch.no_grad(), torch.autocast(loss_scale.device.type, enabled=False):
        if folds:
            return _fold(concerned, gradients, loss_scale, max_norm)
        return _clip_in_place(concerned, gradients, loss_scale, max_norm, norm_type)


def clip_grad_value(
    windows: Sequence[OptimizerWindow], parameters: Iterable[Tensor] | Tensor, clip_value: float
) -> None:
    """Clamp the elements of unscaled gradients, in place.

    Args:
        windows: Windows of all optimizers.
        parameters: Parameters whose gradients are clamped, or one of them.
        clip_value: Largest magnitude.
    """
    held = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    place_gradients(held)
    identities = {id(parameter) for parameter in held}
    concerned = [window for window in windows if window.update.parameters.among(identities)]
    for window in concerned:
        window.unscale()
        # Clamping turns inf into a finite number, so record the overflow first.
        window.note_overflow()
    # Not torch's `clip_grad_value_`: it fails if only some of the gradients are distributed.
    with torch.no_grad():
        for members in shards_by_device([p.grad for p in held if p.grad is not None]).values():
            foreach_clamp_min_(members, -clip_value)
            foreach_clamp_max_(members, clip_value)
    for window in concerned:
        window.accept_clipped()


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
    for window, own in zip(windows, measured, strict=True):
        window.fold_clip(own._replace(global_norm=norm, overflow=overflow), coefficient)
    # No optimizer holds the other gradients, so no step would clip them.
    multiply_in_place(others, coefficient)
    return norm


def _clip_in_place(
    windows: Sequence[OptimizerWindow],
    gradients: Mapping[int, Tensor],
    loss_scale: Tensor,
    max_norm: float,
    norm_type: float,
) -> Tensor:
    are_unscaled = any(window.form is Form.UNSCALED for window in windows)
    for window in windows:
        if are_unscaled:
            window.unscale()
        window.note_overflow()
    clipped = list(gradients.values())
    if norm_type == 2:
        norm = square_of_all(clipped, loss_scale.device).sqrt()
    else:
        norm = norm_of_all(clipped, norm_type, loss_scale.device)
    if not are_unscaled:
        norm = norm / loss_scale
    coefficient = clip_coefficient(norm, max_norm)
    multiply_in_place(clipped, coefficient)
    for window in windows:
        is_whole = window.update.parameters.all_with_gradient_among(gradients)
        window.accept_clipped(coefficient if is_whole else None)
    return norm
