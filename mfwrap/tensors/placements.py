"""Bring gradients to the placements of their parameters.

A distributed parameter (a ``DTensor``) says for each dimension of its mesh whether the ranks hold
shards of it or copies. Backward may leave its gradient in another form:

- **Partial sums.** A replicated parameter that each rank applies to its own tokens, such as the
  weight of a norm under sequence parallelism, gets a gradient of which each rank holds a summand.
- **Copies.** A sharded parameter may get a gradient that each rank holds as a whole.

An optimizer needs the gradient in the form of the parameter, and so does a norm: the square of a
sum is not the sum of the squares of its summands.
"""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from mfwrap.collectives import add_over_ranks
from mfwrap.tensors.shards import is_distributed, placed_as

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


@torch.no_grad()
def place_gradients(parameters: Iterable[Tensor]) -> None:
    """Redistribute gradients whose placements differ from those of their parameters.

    All ranks of a mesh must call this function. It sends nothing if all placements are equal.
    Partial sums of one mesh and dtype are added up in one message; dividing copies into shards
    needs no message. Does not synchronize with the device.

    Args:
        parameters: Parameters, distributed or not, with or without a gradient. A new gradient is
            assigned to ``grad`` where needed.
    """
    # Do not call `is_distributed` for each parameter: this runs in every update.
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return
    kind = module.DTensor
    misplaced = [
        parameter
        for parameter in parameters
        if isinstance(parameter, kind)
        and isinstance(gradient := parameter.grad, kind)
        and gradient.placements != parameter.placements
    ]
    if not misplaced:
        return
    gradients = [cast("DTensor", parameter.grad) for parameter in misplaced]
    for parameter, summed in zip(misplaced, without_partial_sums(gradients), strict=True):
        whole = cast("DTensor", summed)
        parameter.grad = whole.redistribute(parameter.device_mesh, parameter.placements)


@torch.no_grad()
def without_partial_sums(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Add up the partial sums of distributed tensors; other tensors are returned unchanged.

    All ranks of a mesh must call this function. The partial sums of one mesh and dtype are added up
    in one message. Does not synchronize with the device.
    """
    results = list(tensors)
    together: dict[tuple[DeviceMesh, int, torch.dtype], dict[int, DTensor]] = {}
    for index, tensor in enumerate(results):
        if not is_distributed(tensor):
            continue
        partial = [dim for dim, each in enumerate(tensor.placements) if each.is_partial()]
        if len(partial) == 1 and tensor.placements[partial[0]].is_partial("sum"):
            key = (tensor.device_mesh, partial[0], tensor.dtype)
            together.setdefault(key, {})[index] = tensor
        elif partial:
            # Rare: sums over several dimensions of a mesh, or other reductions, such as averages.
            results[index] = tensor.redistribute(placements=_replicated(tensor, partial))
    for (_, dim, _), members in together.items():
        for index, total in zip(members, _added(list(members.values()), dim), strict=True):
            results[index] = total
    return results


def _added(tensors: "Sequence[DTensor]", dim: int) -> "list[DTensor]":
    """Add up the partial sums of tensors of one mesh and dtype over a dimension of the mesh."""
    parts = [tensor.to_local() for tensor in tensors]
    flat = torch.cat([part.reshape(-1) for part in parts])
    add_over_ranks(flat, tensors[0].device_mesh.get_group(dim))
    sums = flat.split([part.numel() for part in parts])
    return [
        # An optimizer may rely on a gradient that has the strides of its parameter.
        placed_as(
            torch.empty_like(part).copy_(total.view(part.shape)), tensor, _replicated(tensor, [dim])
        )
        for tensor, part, total in zip(tensors, parts, sums, strict=True)
    ]


def _replicated(tensor: "DTensor", dims: Sequence[int]) -> "list[Placement]":
    """Return a tensor's placements with copies on the given dimensions of the mesh."""
    from torch.distributed.tensor import Replicate  # noqa: PLC0415  (imported already)

    return [Replicate() if dim in dims else each for dim, each in enumerate(tensor.placements)]
