"""The one place where mfwrap starts a collective or asks how many ranks there are.

All ranks of a group must call the same collective, in the same order. A rank that leaves one out
stops the others until torch's timeout ends the run. Because every message of mfwrap starts here,
a timeout of our own, or a log that explains a deadlock, needs a change in this file only.

Collectives that torch starts itself are not here: those of DistributedDataParallel, of
``fully_shard``, of DTensors (``full_tensor``) and of ``torch.distributed.checkpoint``.

A backend sends tensors of certain devices only: NCCL those on CUDA devices. Pass tensors on the
training device. gloo also takes tensors on CUDA devices, but copies them over the host, and so
synchronizes with the device. With NCCL only `any_rank` and `gather_objects` synchronize.

Without a process group (``torch.distributed`` is not initialized, or not part of this torch) there
is one rank, number 0, and nothing is sent.
"""

from typing import TypeVar

import torch
from torch import Tensor, distributed

_T = TypeVar("_T")


def num_ranks() -> int:
    """Return the number of processes that train together; 1 without a process group."""
    return distributed.get_world_size() if _has_group() else 1


def this_rank() -> int:
    """Return the number of this process among those that train together, counted from 0."""
    return distributed.get_rank() if _has_group() else 0


def add_over_ranks(tensor: Tensor, group: "distributed.ProcessGroup | None" = None) -> None:
    """Replace a tensor, in place, by its sum over the ranks of a group.

    Args:
        tensor: Same shape and dtype on every rank.
        group: Ranks that are summed over; ``None`` for all.
    """
    if group is not None or num_ranks() > 1:
        distributed.all_reduce(tensor, group=group)


def any_rank(*, flag: bool, device: torch.device) -> bool:
    """Return on every rank whether `flag` is true on any. Synchronizes with the device.

    Args:
        flag: This rank's own.
        device: Where the message is made; one that the backend sends from.
    """
    if num_ranks() == 1:
        return flag
    found = torch.full((), float(flag), device=device)
    distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
    return bool(found)


def gather_on_all(tensor: Tensor) -> Tensor:
    """Return the tensors of all ranks on every rank.

    Args:
        tensor: Same shape and dtype on every rank.

    Returns:
        New tensor of shape ``(ranks, *tensor.shape)``, in the order of ranks.
    """
    if num_ranks() == 1:
        return torch.stack([tensor])
    of_ranks = [torch.empty_like(tensor) for _ in range(num_ranks())]
    distributed.all_gather(of_ranks, tensor)
    return torch.stack(of_ranks)


def gather_on_main(tensor: Tensor) -> Tensor | None:
    """Return the tensors of all ranks on rank 0, and ``None`` on the other ranks.

    Args:
        tensor: Same shape and dtype on every rank.

    Returns:
        New tensor of shape ``(ranks, *tensor.shape)``, in the order of ranks.
    """
    if num_ranks() == 1:
        return torch.stack([tensor])
    of_ranks = None
    if this_rank() == 0:
        of_ranks = [torch.empty_like(tensor) for _ in range(num_ranks())]
    distributed.gather(tensor, of_ranks, dst=0)
    return None if of_ranks is None else torch.stack(of_ranks)


def broadcast_from_main(tensor: Tensor) -> None:
    """Replace a tensor, in place, by that of rank 0.

    Args:
        tensor: Same shape and dtype on every rank.
    """
    if num_ranks() > 1:
        distributed.broadcast(tensor, src=0)


def gather_objects(value: _T) -> list[_T]:
    """Return the values of all ranks on every rank, in the order of ranks. Pickles them.

    Synchronizes with the device, so keep it out of an ordinary step.
    """
    if num_ranks() == 1:
        return [value]
    values = [value] * num_ranks()
    distributed.all_gather_object(values, value)
    return values


def _has_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()
