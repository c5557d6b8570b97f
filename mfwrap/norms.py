"""Norms of many tensors from one read of them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mfwrap.devices import on_device

__all__ = ["as_real", "sum_of_squares"]

# Elements: from where on a norm on CPU is taken by rows, and the length of a row.
_LARGE = 2**16
_ROW = 2**12


def sum_of_squares(gradients: Sequence[Tensor | None], device: torch.device) -> Tensor:
    """Compute the sum of squares of each gradient, reading each once.

    Args:
        gradients: ``N`` dense tensors of any floating or complex dtype, shape and device; ``None``
            counts as zeros.
        device: Where the result goes.

    Returns:
        Shape ``(N,)``, float32. Accumulates in float32 (float64 gradients in float64), so the sum
        is infinite for norms above about 1.8e19. Does not wait for the device.
    """
    squares: list[Tensor] = [torch.zeros((), device=device)] * len(gradients)
    by_kind: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[Tensor]]] = {}
    for index, gradient in enumerate(gradients):
        if gradient is not None and gradient.numel() > 0:
            dense = as_real(gradient)
            indices, kind = by_kind.setdefault((dense.device, dense.dtype), ([], []))
            indices.append(index)
            kind.append(dense)
    for (where, dtype), (indices, kind) in by_kind.items():
        squares_of = _squares_on_cpu if where.type == "cpu" else _squares
        kind_squares = squares_of(kind, _accumulation_dtype(dtype))
        moved = on_device(kind_squares, device)
        if len(indices) == len(gradients):
            return moved
        for index, square in zip(indices, moved.unbind(), strict=True):
            squares[index] = square
    return torch.stack(squares)


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _squares(gradients: list[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.stack(torch._foreach_norm(gradients, 2, dtype=dtype)).square_().float()


def _squares_on_cpu(gradients: list[Tensor], dtype: torch.dtype) -> Tensor:
    return _squares([_of_the_same_norm(gradient, dtype) for gradient in gradients], dtype)


def _of_the_same_norm(gradient: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the norms of a large gradient's rows, without copying any of it.

    torch's running float32 sum over 20 million squares is off by 2e-3.
    """
    if gradient.numel() <= _LARGE:
        return gradient
    if gradient.is_contiguous():
        flat = gradient.view(-1)
        rest = flat.numel() % _ROW
        rows = flat[: flat.numel() - rest].view(-1, _ROW)
        norms: Tensor = torch.linalg.vector_norm(rows, dim=1, dtype=dtype)
        if rest:
            norm_of_rest: Tensor = torch.linalg.vector_norm(flat[-rest:], dtype=dtype)
            norms = torch.cat((norms, norm_of_rest.view(1)))
    else:
        # A view would copy; splitting along the longest dimension does not.
        longest = max(range(gradient.dim()), key=lambda dim: gradient.shape[dim])
        length = max(1, _LARGE * gradient.shape[longest] // gradient.numel())
        slices: tuple[Tensor, ...] = gradient.split(length, dim=longest)
        norms = torch.stack([torch.linalg.vector_norm(part, dtype=dtype) for part in slices])
    return _of_the_same_norm(norms, dtype)


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor as a view of real numbers with the same norms."""
    if not tensor.is_complex():
        return tensor
    # A conjugate has the same norms, and only the tensor behind it can be viewed.
    return torch.view_as_real(tensor.conj() if tensor.is_conj() else tensor)
