"""How averages move towards the weights that they follow, without waiting for the device."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from mfwrap.tensors.devices import on_device
from mfwrap.tensors.shards import local_tensors, placed_like

__all__ = ["AveragedGroup", "average_dtype", "copied", "follow_buffers", "grouped", "write"]


class AveragedGroup(NamedTuple):
    """Averages of one dtype on one device, and the weights they follow."""

    weights: list[Tensor]
    averages: list[Tensor]
    converted: bool
    """Whether the weights are of another dtype or on another device than their averages."""

    smoothing_factor: Tensor
    """``1 - decay``, shape ``()``, of the averages' dtype and on their device."""

    zero: Tensor
    nine: Tensor

    def share(self, num_updates: Tensor | None, applied: Tensor | None) -> Tensor:
        """Return the share of the weights in the new averages: 0 if the update was skipped.

        Args:
            num_updates: Applied before this one, for a warm-up; ``None`` without one.
            applied: Whether this one was; ``None`` says that it was.
        """
        factor = self.smoothing_factor
        if num_updates is not None:
            # 1 - (1 + n) / (10 + n), written so that nothing cancels.
            factor = torch.maximum(self.nine / (on_device(num_updates, factor.device) + 10), factor)
        if applied is None:
            return factor
        return torch.where(on_device(applied, factor.device), factor, self.zero)

    def follow(self, share: Tensor) -> None:
        """Move the averages towards the weights; the share is not read on the host."""
        averages, weights = local_tensors(self.averages), local_tensors(self.weights)
        if not self.converted:
            # One factor for each tensor: a single one would be taken for a number, and read.
            torch._foreach_lerp_(averages, weights, [share] * len(averages))
            return
        for average, weight in zip(averages, weights, strict=True):
            average.lerp_(torch.empty_like(average).copy_(weight), share)

    def check_placement(self) -> None:
        """Raise ``RuntimeError`` if weights were moved or converted since they were grouped."""
        for weight, average in zip(self.weights, self.averages, strict=True):
            differ = (weight.device, weight.dtype) != (average.device, average.dtype)
            if differ != self.converted:
                msg = (
                    f"`ema` must be built where its weights are, on {weight.device} in "
                    f"{weight.dtype}, got averages on {average.device} in {average.dtype}; "
                    "build it after the network has been moved"
                )
                raise RuntimeError(msg)


def grouped(
    weights: Mapping[str, Tensor], averages: Mapping[str, Tensor], decay: float
) -> list[AveragedGroup]:
    """Group by device and dtype, once, so that no call has to."""
    members: dict[object, list[str]] = {}
    for name, weight in weights.items():
        average = averages[name]
        key = (weight.device, weight.dtype, average.device, average.dtype)
        members.setdefault(key, []).append(name)
    groups = []
    for names in members.values():
        weight, average = weights[names[0]], averages[names[0]]
        groups.append(
            AveragedGroup(
                weights=[weights[name] for name in names],
                averages=[averages[name] for name in names],
                converted=(weight.device, weight.dtype) != (average.device, average.dtype),
                # Subtracted in Python: in float32, 1 - 0.9999 is 1.00017e-4.
                smoothing_factor=_number(1 - decay, average),
                zero=_number(0.0, average),
                nine=_number(9.0, average),
            )
        )
    return groups


def _number(value: float, average: Tensor) -> Tensor:
    # Not `new_full`, which would distribute the number as the average is.
    return torch.full((), value, dtype=average.dtype, device=average.device)


def follow_buffers(
    copies: Iterable[Tensor], buffers: Iterable[Tensor], applied: Tensor | None
) -> None:
    """Copy buffers, without reading on the host whether the update was applied."""
    if applied is None:
        write(copies, buffers)
        return
    for copy, buffer in zip(copies, buffers, strict=True):
        condition = on_device(applied, copy.device)
        torch.where(condition, on_device(buffer, copy.device), copy, out=copy)


def average_dtype(weight: Tensor) -> torch.dtype:
    """Return the dtype in which an average of this weight does not stall."""
    return torch.float32 if weight.dtype.itemsize < torch.float32.itemsize else weight.dtype


def copied(tensor: Tensor, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    """Return a detached copy; ``None`` keeps the tensor's device or dtype."""
    return tensor.detach().to(device=device, dtype=dtype, copy=True)


@torch.no_grad()
def write(targets: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Write values into tensors in place, whatever their dtypes and devices.

    Collective where a value is distributed over ranks in another way than what it is written into.
    """
    written = list(targets)
    if written:
        placed = [placed_like(value, target) for value, target in zip(values, written, strict=True)]
        torch._foreach_copy_(local_tensors(written), placed)
