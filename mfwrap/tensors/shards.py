"""What a distributed tensor holds on this rank, and which ranks share it."""

import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import torch
from torch import Tensor, distributed

__all__ = [
    "is_distributed",
    "local_tensor",
    "local_tensors",
    "mesh_groups",
    "on_device",
    "placed_like",
]

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

_Tensor = TypeVar("_Tensor", Tensor, Tensor | None)


def is_distributed(tensor: object) -> "TypeGuard[DTensor]":
    """Return whether a tensor is a ``DTensor``: sharded over ranks, replicated, or both."""
    # Its module takes a second to import, and where nobody has imported it there is none.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


@torch.no_grad()
def local_tensors(tensors: Iterable[_Tensor]) -> list[_Tensor]:
    """Return what this rank holds of each tensor: views of the storage, no copies.

    What is no distributed tensor is returned itself.
    """
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return list(tensors)
    kind = module.DTensor
    return [tensor.to_local() if isinstance(tensor, kind) else tensor for tensor in tensors]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return what this rank holds of one tensor; see `local_tensors`."""
    [local] = local_tensors([tensor])
    return local


@torch.no_grad()
def placed_like(value: Tensor, target: Tensor) -> Tensor:
    """Return `value` as the part of it that `target` holds on this rank.

    Collective if `value` is distributed in another way than `target`, and a message to no one
    otherwise.

    Args:
        value: Whole, the same on every rank, or distributed.
        target: Of the same shape.

    Returns:
        Of the shape of ``local_tensor(target)``, maybe a view.
    """
    if is_distributed(value):
        if is_distributed(target) and (value.device_mesh, value.placements) == (
            target.device_mesh,
            target.placements,
        ):
            return local_tensor(value)
        value = value.full_tensor()
    if not is_distributed(target):
        return value
    from torch.distributed.tensor import distribute_tensor  # noqa: PLC0415  (imported already)

    # Every rank has the whole value, so none has to send it.
    part = distribute_tensor(
        value.detach(), target.device_mesh, target.placements, src_data_rank=None
    )
    return part.to_local()


def mesh_groups(mesh: "DeviceMesh") -> "tuple[distributed.ProcessGroup, ...]":
    """Return the groups over which to reduce in turn to reduce over all ranks of a mesh.

    One group wherever there is one; none for a mesh of one rank.
    """
    if mesh.size() == 1:
        return ()
    if mesh.ndim == 1:
        return (mesh.get_group(),)
    world = distributed.group.WORLD
    if world is not None and mesh.size() == world.size():
        return (world,)
    return tuple(mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1)


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`, itself if it is there.

    Waits for the tensor's device when it goes to the CPU, and not otherwise.
    """
    # `to` alone would do the same, but looks like a read to who counts moves to the CPU.
    if tensor.device == device:
        return tensor
    # Pageable memory on the CPU may be read before a copy that was not awaited has arrived.
    return tensor.to(device, non_blocking=device.type != "cpu")
