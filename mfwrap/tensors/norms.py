"""Compute the norms of many tensors, reading each tensor once."""

import itertools
from array import array
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from mfwrap.compatibility.torch import foreach_norm
from mfwrap.tensors.shards import on_device

# Number of elements above which, on a CPU, a tensor's norm is computed by rows.
_LARGE = 2**16
# Number of elements of a row.
_ROW = 2**12
# Number of rows that are converted to the accumulation dtype at once.
_SLAB = 2**6
# Number of elements up to which, on a CPU, tensors of one shape are copied into one tensor.
_SMALL = 2**13
# Largest number of elements of such a copy, which then fits into the cache.
_COPY = 2**18


def sum_of_squares(gradients: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Compute the sum of squares of each gradient, reading each gradient once.

    Args:
        gradients: ``N`` dense tensors of any floating or complex dtype, shape and device; ``None``
            counts as zeros.
        device: Device of the result.

    Returns:
        Sums of shape ``(N,)``, float32. They are accumulated in float32 (float64 for float64
        tensors). A sum is infinite if the norm is above about 1.8e19. Does not synchronize with
        the device.
    """
    return NormReader(device).squares(gradients)


def norms_of_each(tensors: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Compute the L2 norm of each tensor, reading each tensor once.

    A norm below 1e-19 does not become 0, unlike the square root of `sum_of_squares`.

    Args:
        tensors: As in `sum_of_squares`.
        device: Device of the result.

    Returns:
        Norms of shape ``(N,)``, float32. Does not synchronize with the device.
    """
    return NormReader(device).norms(tensors)


class _Kind(NamedTuple):
    """Tensors of one dtype on one device, as indices among all tensors, and how to read them."""

    single: list[int]
    """Tensors that are read one by one, in one call."""

    large: list[int]
    """Tensors on a CPU that are read by rows."""

    stacks: list[list[int]]
    """Small tensors on a CPU that are read as the rows of one tensor: those of a list have the same
    shape."""

    accumulated: torch.dtype
    """Dtype of the sums."""

    is_complex: bool

    @property
    def in_order(self) -> list[int]:
        """All tensors, in the order of `_norms_of_kind`."""
        return [*self.single, *self.large, *itertools.chain.from_iterable(self.stacks)]


@final
class NormReader:
    """Compute norms of the same tensors again and again, as `sum_of_squares` does.

    How the tensors are read depends on their shapes, dtypes and devices. It is worked out in the
    first call, and again when other tensors are ``None`` or a dtype has changed. Shapes and devices
    must not change.

    On a CPU torch calls a kernel for each tensor, which takes longer than to read a small tensor.
    Small tensors of one shape are therefore copied into one tensor, whose rows are read in one
    call.

    Args:
        device: Device of the results.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._dtypes: list[torch.dtype | None] = []
        self._kinds: list[_Kind] = []
        # For each tensor the place of its norm in the order in which the norms are computed; the
        # last place is that of a zero. None if the norms are computed in the tensors' order.
        self._order: array[int] | None = None

    def squares(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the sum of squares of each tensor; see `sum_of_squares`."""
        return self._of_each(tensors, torch.square)

    def norms(self, tensors: Sequence[Tensor | None]) -> Tensor:
        """Return the norm of each tensor; see `norms_of_each`."""
        return self._of_each(tensors, None)

    def _of_each(
        self, tensors: Sequence[Tensor | None], finish: Callable[[Tensor], Tensor] | None
    ) -> Tensor:
        dtypes = [None if tensor is None else tensor.dtype for tensor in tensors]
        if dtypes != self._dtypes:
            self._arrange(tensors)
            self._dtypes = dtypes
        parts = []
        for kind in self._kinds:
            norms = _norms_of_kind(tensors, kind)
            norms = norms if finish is None else finish(norms)
            parts.append(on_device(norms.float(), self._device))
        if self._order is None:
            return parts[0] if len(parts) == 1 else torch.cat(parts)
        parts.append(torch.zeros(1, dtype=torch.float32, device=self._device))
        if self._device.type == "cpu":
            return torch.cat(parts).index_select(
                0, torch.frombuffer(self._order, dtype=torch.int64)
            )
        # The order is on the host. To copy it to the device would synchronize.
        computed = [norm for part in parts for norm in part.unbind()]
        return torch.stack([computed[place] for place in self._order])

    def _arrange(self, tensors: Sequence[Tensor | None]) -> None:
        """Sort the tensors into kinds, and note the places of their norms."""
        members: dict[tuple[torch.device, torch.dtype], list[tuple[int, Tensor]]] = {}
        for index, tensor in enumerate(tensors):
            if tensor is not None and tensor.numel() > 0:
                members.setdefault((tensor.device, tensor.dtype), []).append((index, tensor))
        self._kinds = [_kind(*key, each) for key, each in members.items()]
        computed = [index for kind in self._kinds for index in kind.in_order]
        if computed == list(range(len(tensors))):
            self._order = None
            return
        places = dict(zip(computed, range(len(computed)), strict=True))
        order = (places.get(index, len(computed)) for index in range(len(tensors)))
        self._order = array("q", order)


def _kind(device: torch.device, dtype: torch.dtype, tensors: Sequence[tuple[int, Tensor]]) -> _Kind:
    accumulated = torch.float64 if dtype in (torch.float64, torch.complex128) else torch.float32
    kind = _Kind([], [], [], accumulated, dtype.is_complex)
    if device.type != "cpu":
        return kind._replace(single=[index for index, _ in tensors])
    by_shape: dict[torch.Size, list[int]] = {}
    for index, tensor in tensors:
        if tensor.numel() > _SMALL:
            (kind.large if tensor.numel() > _LARGE else kind.single).append(index)
        else:
            by_shape.setdefault(tensor.shape, []).append(index)
    for shape, members in by_shape.items():
        length = _COPY // shape.numel()
        for start in range(0, len(members), length):
            stack = members[start : start + length]
            if len(stack) == 1:
                kind.single.extend(stack)
            else:
                kind.stacks.append(stack)
    return kind


def _norms_of_kind(tensors: Sequence[Tensor | None], kind: _Kind) -> Tensor:
    # torch's type checks cannot know that none of these tensors is None.
    chosen: Any = tensors
    single = [chosen[index] for index in kind.single]
    large = [chosen[index] for index in kind.large]
    stacks = [torch.stack([chosen[index] for index in stack]) for stack in kind.stacks]
    if kind.is_complex:
        single, large, stacks = (list(map(as_real, each)) for each in (single, large, stacks))
    parts = []
    short = single + [_of_the_same_norm(tensor, kind.accumulated) for tensor in large]
    if short:
        parts.append(torch.stack(foreach_norm(short, 2, dtype=kind.accumulated)))
    for stack in stacks:
        rows = stack.view(len(stack), -1)
        parts.append(torch.linalg.vector_norm(rows, dim=1, dtype=kind.accumulated))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def sums_by_group(squares: Tensor, members: Tensor | None) -> Tensor:
    """Add up sums of squares by group, always in the same order.

    Args:
        squares: Sums of squares of ``N`` parameters, shape ``(N,)``, float32.
        members: Indices of each group's parameters; see `NormGroups.members`.

    Returns:
        Sums of shape ``(G,)``, float32.
    """
    if members is None:
        return squares
    # Gather the squares of each group into a row, and sum each row. Two shorter ways fail. In a
    # product with a matrix of zeros and ones, an inf in one group would make all other groups nan
    # (0 * inf). `index_add_` adds in no fixed order on CUDA.
    padded = torch.cat((squares, squares.new_zeros(1)))
    return padded.take(members).sum(dim=1)


def _of_the_same_norm(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norms of a large tensor's rows: a small tensor with the same norm.

    On a CPU torch adds the squares in one running float32 sum, whose relative error is 2e-3 for
    20 million elements. Sums by rows avoid this error.
    """
    if gradient.numel() <= _LARGE:
        return gradient
    if not gradient.is_contiguous():
        # If the gradient is transposed or channels last, view its elements in memory order.
        by_stride = sorted(range(gradient.dim()), key=gradient.stride, reverse=True)
        gradient = gradient.permute(by_stride)
    norms = _norms_of_rows if gradient.is_contiguous() else _norms_of_slices
    return _of_the_same_norm(torch.cat(norms(gradient, dtype)), dtype)


def _norms_of_rows(gradient: Tensor, dtype: torch.dtype) -> list[Tensor]:
    flat = gradient.view(-1)
    rest = flat.numel() % _ROW
    rows = flat[: flat.numel() - rest].view(-1, _ROW)
    # A conversion to another dtype makes a copy. Convert only a few rows at a time, so that the
    # copy fits into the cache.
    slabs = (rows,) if rows.dtype == dtype else rows.split(_SLAB)
    norms: list[Tensor] = [torch.linalg.vector_norm(slab, dim=1, dtype=dtype) for slab in slabs]
    if rest:
        norms.append(torch.linalg.vector_norm(flat[-rest:], dtype=dtype).view(1))
    return norms


def _norms_of_slices(gradient: Tensor, dtype: torch.dtype) -> list[Tensor]:
    # This tensor is not contiguous: rows would need a copy, but slices along a dimension are views.
    longest = max(range(gradient.dim()), key=lambda dim: gradient.shape[dim])
    length = max(1, _LARGE * gradient.shape[longest] // gradient.numel())
    slices: tuple[Tensor, ...] = gradient.split(length, dim=longest)
    return [torch.linalg.vector_norm(part, dtype=dtype).view(1) for part in slices]


def as_real(tensor: Tensor) -> Tensor:
    """View a complex tensor as real numbers with the same norm; return a real tensor unchanged."""
    if not tensor.is_complex():
        return tensor
    # torch cannot view a lazy conjugate as real numbers. Undo the conjugation: the norms are equal.
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
