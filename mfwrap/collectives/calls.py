"""Start collectives and count ranks. No other module of mfwrap does either.

All ranks of a group must call the same collectives in the same order. If a rank leaves out a
collective, the other ranks wait until torch's timeout ends the run. Because mfwrap starts all its
collectives here, adding a timeout or a log that explains a deadlock takes a change in this file
only.

Collectives that torch starts itself are not here: those of DistributedDataParallel, of
``fully_shard``, of DTensors (``full_tensor``) and of ``torch.distributed.checkpoint``.

A backend sends only tensors on certain devices; NCCL, for example, only tensors on CUDA devices. So
pass tensors on the training device. gloo also takes tensors on CUDA devices, but copies them
through the host, which synchronizes with the device. With NCCL only `any_rank` and `gather_objects`
synchronize.

Without a process group (``torch.distributed`` is not initialized, or this build of torch lacks it)
there is only rank 0, and the functions here send nothing.
"""

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import TypeVar

import torch
from torch import Tensor, distributed

from mfwrap.collectives.clock import Section, section_clock

_T = TypeVar("_T")
_A_DAY = timedelta(days=1)


def num_ranks() -> int:
    """Return the number of processes that train together; 1 without a process group."""
    return distributed.get_world_size() if _has_group() else 1


def this_rank() -> int:
    """Return the rank of this process, counted from 0; 0 without a process group."""
    return distributed.get_rank() if _has_group() else 0


def is_first_on_node() -> bool:
    """Return whether this rank is the lowest one on its node, by the launcher's ``LOCAL_RANK``.

    If the launcher does not set ``LOCAL_RANK``, all ranks count as one node.
    """
    return int(os.environ.get("LOCAL_RANK", this_rank())) == 0


def add_over_ranks(tensor: Tensor, group: "distributed.ProcessGroup | None" = None) -> None:
    """Sum a tensor over the ranks of a group, in place.

    Args:
        tensor: Tensor of the same shape and dtype on every rank.
        group: Ranks to sum over; ``None`` for all ranks.
    """
    if group is not None or num_ranks() > 1:
        with _waiting():
            distributed.all_reduce(tensor, group=group)


def begin_adding_over_ranks(
    tensor: Tensor, group: "distributed.ProcessGroup"
) -> "torch.futures.Future[list[Tensor]]":
    """Begin to sum a tensor over the ranks of a group, in place.

    Args:
        tensor: Tensor of the same shape and dtype on every rank. Do not use it before the sum is
            complete.
        group: Ranks to sum over.

    Returns:
        A future that is complete when the sum is.
    """
    future: torch.futures.Future[list[Tensor]] = distributed.all_reduce(
        tensor, group=group, async_op=True
    ).get_future()
    return future


def any_rank(*, flag: bool, device: torch.device) -> bool:
    """Return whether `flag` is true on at least one rank. All ranks get the same answer.

    Synchronizes with the device.

    Args:
        flag: This rank's flag.
        device: Device of the tensor that is sent; the backend must support it.
    """
    if num_ranks() == 1:
        return flag
    found = torch.full((), float(flag), device=device)
    with _waiting():
        distributed.all_reduce(found, op=distributed.ReduceOp.MAX)
    return bool(found)


def gather_on_all(tensor: Tensor) -> Tensor:
    """Gather the tensors of all ranks on every rank.

    Args:
        tensor: Tensor of the same shape and dtype on every rank.

    Returns:
        New tensor of shape ``(ranks, *tensor.shape)``, in the order of ranks.
    """
    if num_ranks() == 1:
        return torch.stack([tensor])
    of_ranks = [torch.empty_like(tensor) for _ in range(num_ranks())]
    with _waiting():
        distributed.all_gather(of_ranks, tensor)
    return torch.stack(of_ranks)


def gather_on_main(tensor: Tensor) -> Tensor | None:
    """Gather the tensors of all ranks on rank 0.

    Args:
        tensor: Tensor of the same shape and dtype on every rank.

    Returns:
        On rank 0, a new tensor of shape ``(ranks, *tensor.shape)``, in the order of ranks; ``None``
        on the other ranks.
    """
    if num_ranks() == 1:
        return torch.stack([tensor])
    of_ranks = None
    if this_rank() == 0:
        of_ranks = [torch.empty_like(tensor) for _ in range(num_ranks())]
    with _waiting():
        distributed.gather(tensor, of_ranks, dst=0)
    return None if of_ranks is None else torch.stack(of_ranks)


def broadcast_from_main(tensor: Tensor) -> None:
    """Copy rank 0's tensor into the tensor of every other rank, in place.

    Args:
        tensor: Tensor of the same shape and dtype on every rank.
    """
    if num_ranks() > 1:
        with _waiting():
            distributed.broadcast(tensor, src=0)


def gather_objects(value: _T, group: "distributed.ProcessGroup | None" = None) -> list[_T]:
    """Gather the values of all ranks on every rank, in the order of ranks.

    The values are pickled. Synchronizes with the device, so do not call it in an ordinary step.

    Args:
        value: Any value that can be pickled.
        group: Ranks to gather from; ``None`` for all ranks.
    """
    if num_ranks() == 1:
        return [value]
    values = [value] * len(ranks_of(group))
    with _waiting():
        distributed.all_gather_object(values, value, group=group)
    return values


@contextlib.contextmanager
def raising_together() -> Iterator[None]:
    """If the ``with`` block raises an error on any rank, raise this error on all ranks after it.

    All ranks must enter the block. It may do different work on each rank, but must not start a
    collective that a rank could miss because of an error. The end of the block is a barrier.

    Raises:
        Exception: Error of the lowest rank that failed. Another rank raises a copy; if the class of
            the error is not built in, the copy is a RuntimeError with the name of the class.
    """
    own: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001  (raised again below, on all ranks)
        own = error
    errors = gather_objects(None if own is None else _portable(own))
    failed = [rank for rank, found in enumerate(errors) if found is not None]
    first = errors[failed[0]] if failed else None
    if first is not None:
        raise own if own is not None and failed[0] == this_rank() else first


def _portable(error: Exception) -> Exception:
    """Return an error that can be pickled and sent to other ranks."""
    if type(error).__module__ == "builtins":
        return error
    return RuntimeError(f"{type(error).__name__}: {error}")


def ranks_of(group: "distributed.ProcessGroup | None" = None) -> list[int]:
    """Return the ranks of a group; with ``None``, all ranks."""
    return (
        distributed.get_process_group_ranks(group) if group is not None else [*range(num_ranks())]
    )


def _waiting() -> contextlib.AbstractContextManager[None]:
    """Count the time within a block as waiting for other ranks."""
    return section_clock.within(Section.WAITING)


def new_host_group() -> "distributed.ProcessGroup | None":
    """Return a group of all ranks for a thread; it sends what is in host memory.

    Call it on every rank. Without a process group there is none. The other ranks may be slow to
    write a file, so a message may take a day.
    """
    return distributed.new_group(timeout=_A_DAY, backend="gloo") if _has_group() else None


def end_group(group: "distributed.ProcessGroup") -> None:
    """Free a group of `new_host_group`; does nothing if the process group has ended before."""
    if _has_group():
        distributed.destroy_process_group(group)


def _has_group() -> bool:
    return distributed.is_available() and distributed.is_initialized()
