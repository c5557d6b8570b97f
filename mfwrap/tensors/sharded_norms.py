"""Norms of whole tensors, from those of the shards that each rank holds."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple, final

import torch
from torch import Tensor, distributed

from mfwrap.collectives import add_over_ranks
from mfwrap.tensors.norms import as_real, norms_of_each, sum_of_squares
from mfwrap.tensors.shards import is_distributed, local_tensors, mesh_groups, on_device

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["SquareReduction", "has_non_finite", "square_of_all", "tensor_norms"]


class _Ranks(NamedTuple):
    """Ranks that hold parameters together, and what each puts into their sum."""

    groups: "tuple[distributed.ProcessGroup, ...]"
    device: torch.device

    copies: Tensor
    """Shape ``(N + 1,)``, float64, on `device`: how many ranks put in the same, for ``N`` tensors
    and what is summed beside them."""

    counted: Tensor | None
    """Shape ``(N + 1,)``, bool, on `device`: what these ranks sum; ``None`` for all of it."""


@final
class SquareReduction:
    """Sum over ranks what each knows of its shards.

    One all-reduce of ``N + 1`` numbers for each set of ranks that shares tensors, the smallest
    set first. What several of its ranks hold alike (replicated dimensions of a mesh, tensors that
    are not distributed, sums of smaller sets) goes in divided by their number: it is counted once,
    and all ranks of the largest set get the same result, also if only one of them has seen a NaN.
    (A mesh of several dimensions that does not span the world takes one all-reduce for each.)

    Args:
        tensors: ``N`` tensors, of which at least one is distributed; only their placement is used.
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
        """The ranks of the largest set."""

    @classmethod
    def among(cls, tensors: Sequence[Tensor]) -> "SquareReduction | None":
        """Return the reduction that tensors need; ``None`` if none of them is distributed."""
        return cls(tensors) if any(is_distributed(tensor) for tensor in tensors) else None

    def __call__(self, squares: Tensor, partial_sum: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Reduce over ranks; every rank has to call it. Does not wait for the device.

        Args:
            squares: Shape ``(N,)``, float32: of what this rank holds.
            partial_sum: Shape ``()``, float32: summed along over the largest set of ranks.

        Returns:
            The sums of squares of the whole tensors, shape ``(N,)``, and the sum of `partial_sum`,
            shape ``()`` (0 without one), float32.
        """
        beside = squares.new_zeros(1) if partial_sum is None else partial_sum.reshape(1)
        # In double precision the mean of equal numbers is that number, and no sum overflows.
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

    Collective if any tensor is distributed. Does not wait for the device.
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

    Tells elements apart from norms: finite elements of any size are finite here. Collective if any
    tensor is distributed, and then the same on all of its ranks. Does not wait for the device.
    """
    whole = list(tensors)
    # The largest magnitude carries inf and nan and needs no temporary of the tensor's size.
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
