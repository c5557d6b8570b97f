"""Norms of whole tensors, computed from the shards that each rank holds."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor, distributed

from mfwrap.collectives import add_over_ranks
from mfwrap.tensors.norms import as_real, norms_of_each, sum_of_squares
from mfwrap.tensors.shards import is_distributed, local_tensors, mesh_groups, on_device

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class _Ranks(NamedTuple):
    """Ranks that hold shards of the same tensors, and how they sum."""

    groups: "tuple[distributed.ProcessGroup, ...]"
    """Process groups to sum over, one after the other."""

    device: torch.device
    """Device that the ranks send from."""

    copies: Tensor
    """For each of the ``N`` tensors and the partial sum, the number of ranks that contribute the
    same value; shape ``(N + 1,)``, float64, on `device`."""

    counted: Tensor | None
    """Which of the ``N + 1`` values these ranks sum, shape ``(N + 1,)``, bool, on `device`;
    ``None`` for all."""


@final
class SquareReduction:
    """Sum over ranks what each rank has computed of its shards.

    Each set of ranks that shares tensors takes one all-reduce of ``N + 1`` numbers, the smallest
    set first. A value that several ranks of the set have in common (replicated dimensions of a
    mesh, tensors that are not distributed, sums of smaller sets) is divided by the number of these
    ranks, so that it counts once. All ranks of the largest set get the same result, also if only
    one of them has a NaN. (A mesh of several dimensions that does not span all ranks takes one
    all-reduce for each dimension.)

    Args:
        tensors: ``N`` tensors, at least one of them distributed. Only their placements are used.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        meshes = {
            frozenset(tensor.device_mesh.mesh.flatten().tolist()): tensor.device_mesh
            for tensor in tensors
            if is_distributed(tensor)
        }
        ordered = sorted(meshes.items(), key=lambda item: len(item[0]))
        self._stages: list[_Ranks] = []
        last = len(ordered) - 1
        for index, (ranks, mesh) in enumerate(ordered):
            later = {other for other, _ in ordered[index + 1 :]}
            own = [_ranks_of(tensor) == ranks for tensor in tensors]
            counted = [_ranks_of(tensor) not in later for tensor in tensors]
            copies = [
                _num_copies(tensor) if is_distributed(tensor) and is_own else mesh.size()
                for tensor, is_own in zip(tensors, own, strict=True)
            ]
            device = torch.device(mesh.device_type)
            self._stages.append(
                _Ranks(
                    groups=mesh_groups(mesh),
                    device=device,
                    copies=torch.tensor([*copies, 1], dtype=torch.float64).to(device),
                    counted=(None if index == last else torch.tensor([*counted, False]).to(device)),
                )
            )
        self.ranks = ordered[-1][0]
        """Ranks of the largest set."""

    @classmethod
    def among(cls, tensors: Sequence[Tensor]) -> "SquareReduction | None":
        """Return the reduction that tensors need; ``None`` if none is distributed."""
        return cls(tensors) if any(is_distributed(tensor) for tensor in tensors) else None

    def __call__(self, squares: Tensor, partial_sum: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Reduce over ranks; every rank must call it. Does not synchronize with the device.

        Args:
            squares: Sums of squares of this rank's shards, shape ``(N,)``, float32 or float64.
            partial_sum: Number that is summed in the same message over the largest set of ranks,
                shape ``()``, float32.

        Returns:
            Sums of squares of the whole tensors, shape ``(N,)``, and the sum of `partial_sum`,
            shape ``()`` (0 if it is ``None``), in the dtype of `squares`.
        """
        beside = squares.new_zeros(1) if partial_sum is None else partial_sum.reshape(1)
        # In float64 the mean of equal float32 numbers is that number exactly, and no sum overflows.
        sums = torch.cat((squares, on_device(beside, squares.device))).double()
        for stage in self._stages:
            sums = on_device(sums, stage.device)
            reduced = sums / stage.copies
            for group in stage.groups:
                add_over_ranks(reduced, group)
            sums = reduced if stage.counted is None else torch.where(stage.counted, reduced, sums)
        reduced_sums = on_device(sums.to(squares.dtype), squares.device)
        return reduced_sums[:-1], reduced_sums[-1]


def square_of_all(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all elements, shape ``()``, float32, on `device`.

    If any tensor is distributed, all its ranks must call this function. Does not synchronize with
    the device.
    """
    squares = sum_of_squares(local_tensors(tensors), device)
    reduction = SquareReduction.among(tensors)
    if reduction is not None:
        squares, _ = reduction(squares)
    return squares.sum()


@torch.no_grad()
def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the L2 norm of each tensor, reading each once.

    Args:
        tensors: ``N`` floating tensors of any shape, at least one. For a sharded tensor the norm
            of the whole tensor is computed; all ranks must then call this function.

    Returns:
        Shape ``(N,)``, float32, on the device of the first tensor. Does not synchronize with it.
    """
    norms = norms_of_each(local_tensors(tensors), tensors[0].device)
    reduction = SquareReduction.among(tensors)
    if reduction is None:
        return norms
    # In float32 the squares of Adam's second moments would underflow.
    squares, _ = reduction(norms.double().square())
    return squares.sqrt().float()


def has_non_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return whether any element is inf or nan, shape ``()``, bool, on `device`.

    Elements are checked, not norms: large finite elements are finite, even if their norm
    overflows. If any tensor is distributed, all its ranks must call this function, and get the same
    answer. Does not synchronize with the device.
    """
    whole = list(tensors)
    # The largest magnitude is inf or nan if any element is. Unlike `isfinite` on the tensor, it
    # needs no temporary of the tensor's size.
    finite = [
        on_device(torch.linalg.vector_norm(as_real(local), float("inf")).isfinite(), device)
        if local.numel() > 0
        else torch.ones((), dtype=torch.bool, device=device)
        for local in local_tensors(whole)
    ]
    if not finite:
        return torch.zeros((), dtype=torch.bool, device=device)
    found = ~torch.stack(finite)
    reduction = SquareReduction.among(whole)
    if reduction is not None:
        found, _ = reduction(found.float())
    return found.any()


def _ranks_of(tensor: Tensor) -> frozenset[int] | None:
    if not is_distributed(tensor):
        return None
    return frozenset(tensor.device_mesh.mesh.flatten().tolist())


def _num_copies(tensor: "DTensor") -> int:
    """Return how many ranks hold the same elements."""
    copies = 1
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            copies *= tensor.device_mesh.size(dim)
    return copies
