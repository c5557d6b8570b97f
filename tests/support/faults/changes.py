"""Change tensors as a fault does."""

from collections.abc import Callable

import torch
from torch import Tensor

from support.faults.faults import Fault, How, What, Where

__all__ = ["changed", "changed_in_place"]

_EXPONENTS = {
    torch.float32: (torch.int32, 23, 8),
    torch.bfloat16: (torch.int16, 7, 8),
    torch.float16: (torch.int16, 10, 5),
}
"""By type: an integer type of the same width, the lowest bit of the exponent, and its width."""


def _noise(tensor: Tensor, size: float, fault: Fault) -> Tensor:
    # The same noise in a replay, and on all ranks.
    drawn = torch.randn(tensor.shape, generator=torch.Generator().manual_seed(fault.pick))
    return tensor + (size * tensor.float().square().mean().sqrt() * drawn).to(tensor.dtype)


def _with_flipped_bit(tensor: Tensor, _: float, fault: Fault) -> Tensor:
    integers, lowest, width = _EXPONENTS[tensor.dtype]
    bit = lowest + fault.pick % width
    # The integer types are signed, but no bit of an exponent is their sign.
    return (tensor.contiguous().view(integers) ^ (1 << bit)).view(tensor.dtype)


def _permuted(tensor: Tensor, _: float, fault: Fault) -> Tensor:
    return tensor.roll(1, -1 if fault.kind.what is What.LOGITS else 0)


def _transposed(tensor: Tensor, *_: object) -> Tensor:
    return tensor.transpose(0, 1).contiguous().view(tensor.shape)


def _truncated(tensor: Tensor, *_: object) -> Tensor:
    new = tensor.clone()
    new[..., tensor.shape[-1] // 2 :] = 0
    return new


def _with_repeated_half(tensor: Tensor, *_: object) -> Tensor:
    half = len(tensor) // 2
    return torch.cat([tensor[:half], tensor[:half], tensor[2 * half :]])


def _logarithms(tensor: Tensor, size: float, _: Fault) -> Tensor:
    exact = tensor.softmax(-1)
    # Rounding has no slope, so the backward passes it over.
    return (exact + ((exact * size).round() / size - exact).detach()).log()


def _in_float8(tensor: Tensor, size: float, _: Fault) -> Tensor:
    return (tensor / size).to(torch.float8_e4m3fn).to(tensor.dtype) * size


def _clamped(tensor: Tensor, size: float, _: Fault) -> Tensor:
    limit = tensor.detach().abs().max() / size
    return torch.maximum(torch.minimum(tensor, limit), -limit)


def _infinity(tensor: Tensor, _: float, fault: Fault) -> Tensor:
    return tensor * 0 + (torch.inf if fault.pick % 2 == 0 else -torch.inf)


_CHANGES: dict[How, Callable[[Tensor, float, Fault], Tensor]] = {
    How.RAISED: lambda tensor, size, _: tensor * size,
    How.LOWERED: lambda tensor, size, _: tensor / size,
    How.NOISE: _noise,
    How.ZERO: lambda tensor, *_: tensor * 0,
    How.NEGATED: lambda tensor, *_: -tensor,
    How.NAN: lambda tensor, *_: tensor * torch.nan,
    How.INFINITE: _infinity,
    How.BIT: _with_flipped_bit,
    How.PERMUTED: _permuted,
    How.SHIFTED: lambda tensor, size, _: tensor + size,
    How.TRANSPOSED: _transposed,
    How.REORDERED: lambda tensor, *_: tensor.flip(-1),
    How.TRUNCATED: _truncated,
    How.CLAMPED: _clamped,
    How.REPEATED: _with_repeated_half,
    How.MIXED: lambda tensor, *_: (tensor + tensor.roll(1, 0)) / 2,
    How.PROBABILITIES: lambda tensor, *_: tensor.softmax(-1),
    How.LOGARITHMS: _logarithms,
    How.FLOAT8: _in_float8,
}


def changed(tensor: Tensor, fault: Fault, size: float, marks: Tensor | None = None) -> Tensor:
    """Return a tensor as a fault leaves it.

    Args:
        tensor: Tensor before the fault.
        fault: Fault, which says how and where.
        size: Size of the fault at this step.
        marks: Which rows of the micro-batch have the fault; ``None`` for a tensor without such
            rows. If the first dimension is not that of the rows, the whole tensor has it.
    """
    new = _CHANGES[fault.kind.how](tensor, size, fault)
    place = _place(tensor.detach(), fault)
    if marks is not None and tensor.dim() > 0 and len(tensor) == len(marks):
        rows = marks.bool().view(-1, *(1 for _ in tensor.shape[1:]))
        place = rows if place is None else rows & place
    return new if place is None else torch.where(place, new, tensor)


def changed_in_place(tensor: Tensor, fault: Fault, size: float) -> None:
    """Change a tensor in memory."""
    with torch.no_grad():
        tensor.copy_(changed(tensor, fault, size))


def _place(tensor: Tensor, fault: Fault) -> Tensor | None:
    """Return where in a tensor the fault is; ``None`` for the whole tensor."""
    if fault.where is Where.ROW and tensor.dim() > 1:
        place = torch.zeros_like(tensor, dtype=torch.bool)
        place[fault.pick % len(tensor)] = True
        return place
    if fault.where is Where.ELEMENT and tensor.numel() > 1:
        # The second largest element: neither an extreme one nor a zero.
        flat = torch.zeros(tensor.numel(), dtype=torch.bool)
        flat[tensor.float().abs().flatten().topk(2).indices[-1]] = True
        return flat.view(tensor.shape)
    return None
