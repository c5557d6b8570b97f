"""Groups of parameters for local norms, and the names of layers."""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

LocalNormGroups = Literal["layer"] | Sequence[str] | Callable[[str], str | None]
"""How parameters are grouped for local norms; see `StepConfig.local_norm_groups`."""


@final
@dataclass(frozen=True, slots=True)
class NormGroups:
    """Groups of parameters, each with one local norm.

    `mfwrap.tensors.norms.sums_by_group` adds up the squares of each group's gradients.
    """

    names: tuple[str, ...]
    """Names of the ``G`` groups."""

    sizes: Tensor
    """Number of gradient elements of each group, shape ``(G,)``, int64."""

    members: Tensor | None
    """Indices of each group's parameters among all ``N`` parameters, padded with ``N``; shape
    ``(G, size of the largest group)``, int64. ``None`` if each parameter is its own group."""


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
        sizes: Number of elements of each parameter by name, in the network's order.
        groups: Grouping; see `StepConfig.local_norm_groups`.
        device: Device of the norms.
        left_out: Names of frozen parameters, which are in no group.
        may_be_empty: Drop a pattern that matches no parameter instead of raising.

    Raises:
        TypeError: If a callable returns neither a str nor ``None``.
        ValueError: If a pattern matches no parameter, no parameter is in a group, or all parameters
            are frozen.
    """
    if len(left_out) == len(sizes) and not may_be_empty:
        msg = f"`optimizer` must hold a trainable parameter, got {len(sizes)} that are all frozen"
        raise ValueError(msg)
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
        msg = (
            "`local_norm_groups` must match trainable parameters, got no match for "
            f"{empty or groups}"
        )
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
        return layer_of(name)
    return next((pattern for pattern in groups if re.search(pattern, name)), None)


def layer_of(parameter: str) -> str:
    """Return the layer of a parameter: its name up to the first number, or else its module.

    Args:
        parameter: Full name of a parameter. For the name of a module, use `layer_of_module`.

    Example:
        >>> layer_of("model.layers.3.mlp.up_proj.weight"), layer_of("vit.embeddings.cls_token")
        ('model.layers.3', 'vit.embeddings')
    """
    return _numbered_part(parameter) or parameter.rpartition(".")[0] or parameter


def layer_of_module(module: str) -> str:
    """Return the layer of a module: its name up to the first number, or else the module itself.

    Args:
        module: Full name of a module, or of a group of parameters.

    Example:
        >>> layer_of_module("model.layers.3.mlp"), layer_of_module("model.embed_tokens")
        ('model.layers.3', 'model.embed_tokens')
    """
    return _numbered_part(module) or module


def _numbered_part(name: str) -> str:
    """Return a dotted name up to and including its first number; empty without a number."""
    parts = name.split(".")
    numbered = next((end for end, part in enumerate(parts, start=1) if part.isdigit()), 0)
    return ".".join(parts[:numbered])


def _int64(values: Sequence[object], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device=device)
