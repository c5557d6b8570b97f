"""Groups of gradients, and clipping."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

import torch
from torch import Tensor

from mfwrap.arguments import described
from mfwrap.config import LocalNormGroups
from mfwrap.tensors.norms import sum_of_squares
from mfwrap.tensors.sharded_norms import has_non_finite, square_of_all
from mfwrap.tensors.shards import on_device

__all__ = [
    "NormGroups",
    "clip_by_global_norm",
    "clip_by_value",
    "clip_coefficient",
    "group_parameters",
    "has_non_finite",
    "sum_of_squares",
]

_TensorSequence = TypeVar("_TensorSequence", list[Tensor], tuple[Tensor, ...])
_Tensors = TypeVar("_Tensors", Tensor, list[Tensor], tuple[Tensor, ...])


@final
@dataclass(frozen=True, slots=True)
class NormGroups:
    """Which parameters share a local norm."""

    names: tuple[str, ...]
    """Names of the ``G`` groups."""

    sizes: Tensor
    """Shape ``(G,)``, int64: gradient elements per group."""

    members: Tensor | None
    """Shape ``(G, largest group)``, int64: indices into the ``N`` parameters, padded with ``N``;
    ``None`` if each parameter is its own group."""

    def sums(self, squares: Tensor) -> Tensor:
        """Add sums of squares by group, in a fixed order.

        Args:
            squares: Shape ``(N,)``, float32.

        Returns:
            Shape ``(G,)``, float32.
        """
        if self.members is None:
            return squares
        # A gather and a row sum, because a product with a 0-1 matrix would carry one group's
        # inf into all others as 0 * inf, and index_add_ has no fixed order on CUDA.
        padded = torch.cat((squares, squares.new_zeros(1)))
        return padded.take(self.members).sum(dim=1)


def group_parameters(
    sizes: Mapping[str, int],
    groups: LocalNormGroups | None,
    device: torch.device,
    *,
    left_out: Collection[str] = (),
    may_be_empty: bool = False,
) -> NormGroups:
    """Sort parameters into groups for local norms.

    Args:
        sizes: Number of elements by parameter name, in the network's order.
        groups: As `StepConfig.local_norm_groups`.
        device: Where the norms are.
        left_out: Names that are in no group.
        may_be_empty: Drop a pattern that finds no parameter instead of raising.

    Raises:
        TypeError: If a callable returns neither a str nor ``None``.
        ValueError: If a pattern finds no parameter, or no parameter is in a group.
    """
    if groups is None and not left_out:
        return NormGroups(tuple(sizes), _int64(list(sizes.values()), device), None)
    members: dict[str, list[int]] = {}
    if groups is not None and groups != "layer" and not callable(groups):
        members = {pattern: [] for pattern in groups}
    for index, name in enumerate(sizes):
        group = None if name in left_out else _group_of(name, groups)
        if group is not None:
            members.setdefault(group, []).append(index)
    empty = [group for group, indices in members.items() if not indices]
    if may_be_empty:
        members = {group: indices for group, indices in members.items() if indices}
    elif empty or not members:
        msg = f"`local_norm_groups` must find trainable parameters, got none for {empty or groups}"
        raise ValueError(msg)
    elements = list(sizes.values())
    longest = max(map(len, members.values()), default=0)
    return NormGroups(
        names=tuple(members),
        sizes=_int64([sum(elements[i] for i in row) for row in members.values()], device),
        members=_int64(
            [row + [len(sizes)] * (longest - len(row)) for row in members.values()], device
        ).reshape(len(members), longest),
    )


def _group_of(name: str, groups: LocalNormGroups | None) -> str | None:
    if groups is None:
        return name
    if callable(groups):
        group = groups(name)
        if group is not None and not isinstance(group, str):
            msg = f"`local_norm_groups` must return a str or None, got {group!r} for {name!r}"
            raise TypeError(msg)
        return group
    if groups == "layer":
        return _layer_of(name)
    return next((pattern for pattern in groups if re.search(pattern, name)), None)


def _layer_of(name: str) -> str:
    """Return the name up to its first number, or else the module that owns the parameter."""
    parts = name.split(".")
    for end, part in enumerate(parts, start=1):
        if part.isdigit():
            return ".".join(parts[:end])
    return ".".join(parts[:-1]) or name


def _int64(values: Sequence[object], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)


def clip_coefficient(global_norm: Tensor, max_norm: float) -> Tensor:
    """Return ``min(1, max_norm / (global_norm + 1e-6))``, as torch's ``clip_grad_norm_`` has it.

    Args:
        global_norm: Shape ``()``.
        max_norm: Largest norm, > 0; ``inf`` never clips.
    """
    return (max_norm / (global_norm + 1e-6)).clamp(max=1.0)


def clip_by_global_norm(
    x: _TensorSequence, clip_norm: float = 1.0, use_norm: None = None
) -> _TensorSequence:
    """Scale tensors so that their global L2 norm is at most `clip_norm`.

    ``x * clip_norm / max(global_norm, clip_norm)``, without the 1e-6 of the training step.

    Source: MindSpore, ``ops.clip_by_global_norm``.

    Args:
        x: Tensors of any floating dtype; not changed.
        clip_norm: Largest norm, > 0.
        use_norm: Only ``None``, as in MindSpore.

    Returns:
        New tensors with the dtypes of `x`, in a container of the same kind. If the norm is
        infinite, finite elements become 0 and infinite ones nan; if it is nan, finite elements
        stay. Does not wait for the device.

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
    # `where`, because `maximum` would turn a nan norm into a nan factor.
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
        clip_value_min: Lower bound, ``None`` for none.
        clip_value_max: Upper bound, ``None`` for none. If it is below `clip_value_min`, every
            element becomes it.

    Returns:
        New tensors with the shapes and dtypes of `x`, in a container of the same kind.

    Raises:
        TypeError: If `x` or a bound has another type.
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
    # Two calls, because torch.clamp takes no mixture of a tensor and a number.
    above = x if lowest is None else torch.clamp(x, min=lowest)
    return (above if highest is None else torch.clamp(above, max=highest)).to(x.dtype)


def _kind(value: object) -> str:
    if isinstance(value, (list, tuple)):
        return f"a {type(value).__name__} of {sorted({type(v).__name__ for v in value})}"
    return described(value)
