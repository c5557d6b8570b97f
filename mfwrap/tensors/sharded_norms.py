"""Norms of whole tensors, computed from the shards that each rank holds."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, distributed

from mfwrap.collectives import add_over_ranks
from mfwrap.tensors.norms import as_real, norms_of_each, sum_of_squares
from mfwrap.tensors.placements import without_partial_sums
from mfwrap.tensors.shards import (
    is_distributed,
    local_tensors,
    meeting_device,
    mesh_groups,
    on_device,
)


class _Ranks(NamedTuple):
    """Ranks that hold shards of the same tensors, and how to sum over them."""

    groups: "tuple[distributed.ProcessGroup, ...]"
    """Process groups to sum over, one after the other."""

    device: torch.device
    """Device from which the ranks send."""

    copies: Tensor
    """Number of ranks that contribute the same value, for each of the ``N`` tensors and for the
    partial sum; shape ``(N + 1,)``, float64, on `device`."""

    counted: Tensor | None
    """Whether each of the ``N + 1`` values is summed over these ranks, shape ``(N + 1,)``, bool, on
    `device`; ``None`` if all are."""


@final
class SquareReduction:
    """Add up sums of squares of shards, over the ranks that hold the shards.

    Each set of ranks that shares tensors does one all-reduce of ``N + 1`` numbers, the smallest set
    first. (If a mesh has several dimensions and does not span all ranks, there is one all-reduce
    for each dimension.)

    Several ranks of a set may contribute the same value: replicas, tensors that are not
    distributed, sums over smaller sets. Such a value is divided by the number of these ranks, so
    that it counts once. All ranks of the largest set get the same result, even if only one of them
    has a NaN.

    Args:
        tensors: ``N`` tensors, at least one of them distributed. Only their placements are used.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        holders = [_ranks_of(tensor) for tensor in tensors]
        meshes = {
            ranks: tensor.device_mesh
            for tensor, ranks in zip(tensors, holders, strict=True)
            if is_distributed(tensor) and ranks is not None
        }
        ordered = sorted(meshes.items(), key=lambda item: len(item[0]))
        self._stages: list[_Ranks] = []
        last = len(ordered) - 1
        for index, (ranks, mesh) in enumerate(ordered):
            later = {other for other, _ in ordered[index + 1 :]}
            counted = [own not in later for own in holders]
            copies = [
                _num_copies(tensor) if own == ranks else mesh.size()
                for tensor, own in zip(tensors, holders, strict=True)
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
        self.sets = [sorted(ranks) for ranks, _ in ordered]
        """All sets of ranks, the largest last."""

    @classmethod
    def among(cls, tensors: Sequence[Tensor]) -> "SquareReduction | None":
        """Return a reduction for `tensors`; ``None`` if no tensor is distributed."""
        return cls(tensors) if any(is_distributed(tensor) for tensor in tensors) else None

    def __call__(self, squares: Tensor, partial_sum: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Sum over ranks. Every rank must call this. Does not synchronize with the device.

        Args:
            squares: Sums of squares of this rank's shards, shape ``(N,)``, float32 or float64.
            partial_sum: Number that is summed over the largest set of ranks in the same message,
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

    If any tensor is distributed, all ranks of its mesh must call this function. Does not
    synchronize with the device.
    """
    whole = without_partial_sums(tensors)
    squares = sum_of_squares(local_tensors(whole), device)
    reduction = SquareReduction.among(whole)
    if reduction is not None:
        squares, _ = reduction(squares)
    return squares.sum()


@torch.no_grad()
def norm_of_all(tensors: Sequence[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the norm of all elements, as ``torch.nn.utils.get_total_norm`` does.

    Unlike that function, it takes tensors of several meshes, and plain tensors among them. If any
    tensor is distributed, all ranks of its mesh must call this function.

    Args:
        tensors: At least one tensor, of any shape.
        norm_type: Type of the norm, for example 1 or inf.
        device: Device of the result.

    Returns:
        Shape ``()``, the same on all ranks.
    """
    by_mesh: dict[Any, list[Tensor]] = {}
    for tensor in without_partial_sums(tensors):
        by_mesh.setdefault(tensor.device_mesh if is_distributed(tensor) else None, []).append(
            tensor
        )
    norms: list[Tensor] = []
    for each in by_mesh.values():
        norm = torch.nn.utils.get_total_norm(each, norm_type)
        norms.append(on_device(norm.full_tensor() if is_distributed(norm) else norm, device))
    if len(norms) == 1:
        return norms[0]
    total: Tensor = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    return total


@torch.no_grad()
def tensor_norms(tensors: Sequence[Tensor]) -> Tensor:
    """Compute the L2 norm of each tensor, reading each tensor once.

    Args:
        tensors: ``N`` >= 1 floating tensors of any shape. For a sharded tensor the norm of the
            whole tensor is computed, and all ranks of its mesh must call this function.

    Returns:
        Shape ``(N,)``, float32, on the first device of a tensor that is not the CPU. Does not
        synchronize with the device.
    """
    whole = without_partial_sums(tensors)
    norms = norms_of_each(local_tensors(whole), meeting_device(tensors))
    reduction = SquareReduction.among(whole)
    if reduction is None:
        return norms
    # Square in float64: in float32 the squares of Adam's second moments would underflow.
    squares, _ = reduction(norms.double().square())
    return squares.sqrt().float()


def has_non_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Return whether any element is inf or nan, shape ``()``, bool, on `device`.

    The elements are checked, not their norm, which may overflow although all elements are finite.
    If any tensor is distributed, all ranks of its mesh must call this function, and get the same
    answer. Does not synchronize with the device.
    """
    whole = without_partial_sums(list(tensors))
    # If any element is non-finite, so is the largest magnitude. To compute the largest magnitude,
    # torch needs no temporary of the tensor's size; `isfinite` on the tensor would need one.
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


def _num_copies(tensor: Any) -> int:
    """Return how many ranks hold the same elements of a tensor."""
    copies = 1
    for dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            copies *= tensor.device_mesh.size(dim)
    return copies
