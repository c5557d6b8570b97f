"""Distributed tensors: this rank's shard, the ranks of a mesh, and moves to another device."""

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeGuard, TypeVar

import torch
from torch import Tensor, distributed

from mfwrap.compatibility.torch import foreach_mul_

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement

_Tensor = TypeVar("_Tensor", Tensor, Tensor | None)


def is_distributed(tensor: object) -> "TypeGuard[DTensor]":
    """Return whether a tensor is a ``DTensor``: sharded over ranks, replicated, or both."""
    # Do not import the module here, because that takes a second. If no other code has imported the
    # module, no DTensor exists.
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_tensors(tensors: Iterable[_Tensor]) -> list[_Tensor]:
    """Return this rank's shard of each tensor as a view; plain tensors are returned unchanged."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None:
        return list(tensors)
    kind = module.DTensor
    with torch.no_grad():
        return [tensor.to_local() if isinstance(tensor, kind) else tensor for tensor in tensors]


def local_tensor(tensor: Tensor) -> Tensor:
    """Return this rank's shard of one tensor; see `local_tensors`."""
    [local] = local_tensors([tensor])
    return local


def shards_by_device(tensors: Iterable[Tensor]) -> dict[torch.device, list[Tensor]]:
    """Return this rank's shards of tensors by device; see `local_tensors`."""
    by_device: dict[torch.device, list[Tensor]] = {}
    for local in local_tensors(tensors):
        by_device.setdefault(local.device, []).append(local)
    return by_device


@torch.no_grad()
def multiply_in_place(tensors: Iterable[Tensor], factor: Tensor) -> None:
    """Multiply tensors on any devices by `factor`, a tensor of shape ``()``, without host reads."""
    for device, members in shards_by_device(tensors).items():
        foreach_mul_(members, on_device(factor, device))


@torch.no_grad()
def placed_like(value: Tensor, target: Tensor) -> Tensor:
    """Return the part of `value` that belongs to this rank's shard of `target`.

    If `value` is distributed differently from `target`, all ranks must call this function, because
    it gathers `value`. Otherwise it sends nothing.

    Args:
        value: Whole tensor, the same on every rank, or a distributed tensor.
        target: Tensor of the same shape.

    Returns:
        Tensor with the shape of ``local_tensor(target)``, maybe a view.
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

    # Every rank has the whole value, so torch need not send it (`src_data_rank=None`).
    part = distribute_tensor(
        value.detach(), target.device_mesh, target.placements, src_data_rank=None
    )
    return part.to_local()


def placed_as(
    value: Tensor, like: "DTensor", placements: "Sequence[Placement] | None" = None
) -> "DTensor":
    """Return the distributed tensor of which `value` is this rank's part.

    Args:
        value: This rank's part.
        like: Tensor of the same mesh, shape and strides.
        placements: Placements of the result; ``None`` for those of `like`.
    """
    return type(like).from_local(
        value,
        like.device_mesh,
        placements or like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def mesh_groups(mesh: "DeviceMesh") -> "tuple[distributed.ProcessGroup, ...]":
    """Return process groups; reducing over one after another reduces over the whole mesh.

    The result is a single group if torch already has a group of all ranks of the mesh. A mesh of
    one rank needs no group.
    """
    if mesh.size() == 1:
        return ()
    if mesh.ndim == 1:
        return (mesh.get_group(),)
    world = distributed.group.WORLD
    if world is not None and mesh.size() == world.size():
        return (world,)
    return tuple(mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1)


def meeting_device(tensors: Iterable[Tensor]) -> torch.device:
    """Return the device that tensors of several devices are best moved to, with `on_device`.

    It is the first one that is not the CPU: a move to the CPU waits for the device. If all are on
    the CPU, it is the CPU.
    """
    devices = [tensor.device for tensor in tensors]
    return next((device for device in devices if device.type != "cpu"), devices[0])


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a copy of `tensor` on `device`, or `tensor` itself if it is there already.

    Synchronizes with the tensor's device only for a copy to the CPU.
    """
    # `to` would also return the tensor itself, but tests count a call of `to("cpu")` as a read.
    if tensor.device == device:
        return tensor
    # A copy to the CPU must block. Otherwise the host could read the values before they are copied.
    return tensor.to(device, non_blocking=device.type != "cpu")
