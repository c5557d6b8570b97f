"""Compute and store averages of weights, without synchronizing with the device."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.sgd import sgd

from mfwrap.arguments import described
from mfwrap.compatibility.torch import foreach_copy_, foreach_lerp_
from mfwrap.tensors.shards import is_distributed, local_tensors, on_device, placed_like
from mfwrap.tensors.wrappers import plain_name, reshard, unwrapped_network

_PIECE = 2**23
"""Numbers that are converted at a time: in float32, the cache of a large GPU still has them when
they are averaged."""


class AveragedGroup(NamedTuple):
    """Weights of one dtype on one device, and their averages, also of one dtype on one device."""

    weights: list[Tensor]
    averages: list[Tensor]
    converted: bool
    """Whether weights and averages differ in dtype or device."""

    fused: bool
    """Whether a step of fused SGD moves the averages."""

    smoothing_factor: Tensor
    """``1 - decay``: shape ``()``, dtype and device of the averages."""

    sharded: bool
    """Whether weights or averages are distributed over ranks."""

    nine: Tensor
    """9 in the shape, dtype and device of `smoothing_factor`, made once to save time."""

    exponent: float | None
    """``gamma + 1`` of a power-function average; ``None`` for an exponential one."""

    def share(
        self, num_updates: Tensor | None, averaged_updates: Tensor, applied: Tensor | None
    ) -> Tensor:
        """Return the share of the current weights in the new averages; 0 for a skipped update.

        Args:
            num_updates: Number of updates applied before this one, for the warm-up and for
                power-function averages; ``None`` if the decay is constant.
            averaged_updates: Number of updates that a power-function average holds.
            applied: Whether this update was applied; ``None`` means that it was.
        """
        factor = self.smoothing_factor
        if num_updates is not None and self.exponent is not None:
            # Equal to 1 - (s / t)**exponent, but without the subtraction, which would lose digits.
            dtype = torch.promote_types(factor.dtype, torch.float32)
            now = on_device(num_updates, factor.device) + 1
            new = (now - on_device(averaged_updates, factor.device)).to(dtype) / now.to(dtype)
            factor = -torch.expm1(self.exponent * torch.log1p(-new)).to(factor.dtype)
        elif num_updates is not None:
            # Equal to 1 - (1 + n) / (10 + n), but without the subtraction, which would lose digits.
            factor = torch.maximum(self.nine / (on_device(num_updates, factor.device) + 10), factor)
        return factor if applied is None else factor * on_device(applied, factor.device)

    def follow(self, share: Tensor) -> None:
        """Move the averages towards the weights by `share`, which stays on the device."""
        averages, weights = self.averages, self.weights
        if self.sharded:
            averages, weights = local_tensors(averages), local_tensors(weights)
        # A step of fused SGD takes a rate on the device. Without it, the share is the rate.
        move, rate = (move_by_sgd, -share.float()) if self.fused else (_lerp, share)
        # Averages begin as copies, which are blocks of memory. So are weights of equal strides.
        if not self.converted and (not self.fused or _strides(averages) == _strides(weights)):
            move(averages, weights, rate)
            return
        blocks: list[tuple[Tensor, Tensor]] = []
        for average, weight in zip(averages, weights, strict=True):
            if (block := _block(average, weight)) is None:
                average.lerp_(weight.to(average), share)
            else:
                blocks.append(block)
        for targets, sources in _pieces(blocks):
            move(targets, _converted(sources, targets), rate)

    def check_placement(self) -> None:
        """Raise ``RuntimeError`` if a weight was moved or converted after construction."""
        for weight, average in zip(self.weights, self.averages, strict=True):
            differ = (weight.device, weight.dtype) != (average.device, average.dtype)
            if differ != self.converted:
                msg = (
                    f"`ema` must match the network's weights, on {weight.device} in "
                    f"{weight.dtype}, got averages on {average.device} in {average.dtype}; "
                    "build `ema` after you move or convert the network"
                )
                raise RuntimeError(msg)


def move_by_sgd(averages: list[Tensor], weights: list[Tensor], rate: Tensor) -> None:
    """Move averages towards weights with a step of fused SGD.

    With a weight decay of -1, the gradient ``weight`` becomes ``weight - average``. The kernel asks
    for equal strides. On a CPU the averages must be in float32: in shorter dtypes, torch before
    2.15 computes wrong numbers.

    Args:
        averages: Averages, which are changed.
        weights: Weights with their dtypes, devices and strides.
        rate: The negative share of the weights in the new averages: shape ``()``, float32.
    """
    on_device: Any = rate  # torch takes a tensor, too, and does not read it on the host
    sgd(
        averages,
        weights,
        [None] * len(averages),
        fused=True,
        weight_decay=-1.0,
        lr=on_device,
        momentum=0.0,
        dampening=0.0,
        nesterov=False,
        maximize=False,
    )
    # Unlike other operators, the kernel does not tell autograd that tensors have changed.
    torch.autograd.graph.increment_version(averages)


def _lerp(averages: list[Tensor], weights: list[Tensor], share: Tensor) -> None:
    # Pass a list of shares. torch would read a single tensor on the host, which synchronizes with
    # the device.
    foreach_lerp_(averages, weights, [share] * len(averages))


def _strides(tensors: list[Tensor]) -> list[tuple[int, ...]]:
    return [tensor.stride() for tensor in tensors]


def _block(average: Tensor, weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return both tensors in the order of their memory; ``None`` if one is not a block of memory.

    Weights in the format channels_last and transposed ones are blocks as well. Equal strides make
    equal orders.
    """
    if average.stride() != weight.stride():
        return None
    if not average.is_contiguous():
        strides = average.stride()
        order = sorted(range(average.dim()), key=lambda dim: -strides[dim])
        average, weight = average.permute(order), weight.permute(order)
    return (average, weight) if average.is_contiguous() else None


def _converted(sources: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    """Return copies of tensors with the dtypes, devices and strides of others."""
    values = [torch.empty_like(target) for target in targets]
    foreach_copy_(values, sources)
    return values


def _pieces(
    blocks: Iterable[tuple[Tensor, Tensor]],
) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Yield averages and weights, or slices of them, with `_PIECE` numbers at a time, or fewer.

    Args:
        blocks: Average and weight, each contiguous.
    """
    targets: list[Tensor] = []
    sources: list[Tensor] = []
    room = _PIECE
    for average, weight in blocks:
        parts = [(average, weight)]
        if average.numel() > room:  # fill the piece, and cut the rest into whole ones
            flat = average.view(-1), weight.view(-1)
            slices = ((each[:room], *each[room:].split(_PIECE)) for each in flat)
            parts = list(zip(*slices, strict=True))
        for target, source in parts:
            targets.append(target)
            sources.append(source)
            room -= target.numel()
            if not room:
                yield targets, sources
                targets, sources, room = [], [], _PIECE
    if targets:
        yield targets, sources


def grouped(
    weights: Mapping[str, Tensor],
    averages: Mapping[str, Tensor],
    decay: float,
    exponent: float | None = None,
) -> list[AveragedGroup]:
    """Group weights and averages by device and dtype."""
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
                fused=_has_fused_step(average, decay),
                sharded=any(map(is_distributed, (*weights.values(), *averages.values()))),
                # Subtract in Python's float64: in float32, 1 - 0.9999 would be 1.00017e-4.
                smoothing_factor=_number(1 - decay, average),
                nine=_number(9.0, average),
                exponent=exponent,
            )
        )
    return groups


def _has_fused_step(average: Tensor, decay: float) -> bool:
    """Return whether a step of fused SGD may move averages like this one.

    On CUDA, torch's ``lerp`` launches one kernel for each weight if the share is a tensor on the
    device. A step of fused SGD takes many weights at once. Its rate is in float32, which is too
    short for averages in float64, and for shares of more than a half it rounds more than ``lerp``
    does. The first shares of a warm-up are that large, too, but then weights and averages still
    differ little.
    """
    return average.is_cuda and average.dtype != torch.float64 and decay >= 0.5


def _number(value: float, average: Tensor) -> Tensor:
    # Do not use `average.new_full`: for a distributed average it returns a distributed tensor.
    return torch.full((), value, dtype=average.dtype, device=average.device)


def follow_buffers(
    copies: Iterable[Tensor], buffers: Iterable[Tensor], applied: Tensor | None
) -> None:
    """Copy `buffers` into `copies` if `applied` is true, without reading `applied` on the host."""
    if applied is None:
        write(copies, buffers)
        return
    for copy, buffer in zip(copies, buffers, strict=True):
        condition = on_device(applied, copy.device)
        torch.where(condition, on_device(buffer, copy.device), copy, out=copy)


def average_dtype(weight: Tensor) -> torch.dtype:
    """Return the default dtype of a weight's average: at least float32."""
    return torch.float32 if weight.dtype.itemsize < torch.float32.itemsize else weight.dtype


def copied(tensor: Tensor, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    """Return a detached copy; ``None`` keeps the device or dtype of `tensor`."""
    return tensor.detach().to(device=device, dtype=dtype, copy=True)


@torch.no_grad()
def write(targets: Iterable[Tensor], values: Iterable[Tensor]) -> None:
    """Copy values into target tensors, in place, and convert their dtypes and devices.

    If a value is distributed differently from its target, all ranks must call this function.
    """
    written = list(targets)
    if written:
        placed = [placed_like(value, target) for value, target in zip(values, written, strict=True)]
        foreach_copy_(local_tensors(written), placed)


class BufferPlace(NamedTuple):
    """Find a buffer by its module and attribute name.

    A reference to the tensor itself would become stale, because ``module.to()`` replaces buffers.
    """

    module: nn.Module
    attribute: str

    def tensor(self) -> Tensor:
        return self.module.get_buffer(self.attribute)


def named_weights(parameters: nn.Module | Iterable[Tensor]) -> dict[str, Tensor]:
    """Return the weights to average by name, each tensor once."""
    weights: dict[str, Any]
    if isinstance(parameters, nn.Module):
        reshard(parameters)
        network = unwrapped_network(parameters)
        weights = {plain_name(n): p for n, p in network.named_parameters() if p.requires_grad}
    elif isinstance(parameters, Tensor) or not isinstance(parameters, Iterable):
        msg = (
            f"`parameters` must be a module or an iterable of tensors, got {described(parameters)}"
        )
        raise TypeError(msg)
    else:
        unique = {id(tensor): tensor for tensor in parameters}
        weights = {str(index): tensor for index, tensor in enumerate(unique.values())}
    for name, weight in weights.items():
        if not isinstance(weight, Tensor) or not weight.is_floating_point():
            msg = f"`parameters` must be floating-point tensors, got {_kind(weight)} at {name!r}"
            raise TypeError(msg)
    if not weights:
        msg = "`parameters` must hold at least one trainable tensor, got none"
        raise ValueError(msg)
    return weights


def buffer_places(parameters: object) -> dict[str, BufferPlace]:
    """Return the place of each persistent buffer by name; empty if `parameters` is not a module."""
    if not isinstance(parameters, nn.Module):
        return {}
    network = unwrapped_network(parameters)
    persistent = network.state_dict()
    places = {}
    for name, _ in network.named_buffers():
        if name in persistent:
            path, _, attribute = name.rpartition(".")
            places[plain_name(name)] = BufferPlace(network.get_submodule(path), attribute)
    return places


def check_names(label: str, given: object, expected: Mapping[str, object]) -> None:
    """Check that `given` is a mapping with exactly the expected names; raise an error if not."""
    if not isinstance(given, Mapping):
        msg = f"`{label}` must be a mapping, got {described(given)}"
        raise TypeError(msg)
    missing = [name for name in expected if name not in given]
    unknown = [name for name in given if name not in expected]
    if missing or unknown:
        msg = (
            f"`{label}` must have the names of this average; missing: {missing}, unknown: {unknown}"
        )
        raise KeyError(msg)


def fitting_tensors(
    label: str, given: Mapping[str, Tensor], expected: Mapping[str, Tensor]
) -> list[Tensor]:
    """Return the tensors in the order of `expected`; raise an error if one is missing or unfit.

    A tensor fits if it has the expected shape and dtype. If the expected dtype is floating-point,
    any other floating-point dtype fits, too.
    """
    for name, tensor in expected.items():
        if name not in given:
            msg = f"`{label}` must have the averaged names; missing: {name!r}"
            raise KeyError(msg)
        value = given[name]
        if not isinstance(value, Tensor):
            msg = f"`{label}` must hold a tensor at {name!r}, got {described(value)}"
            raise TypeError(msg)
        if value.shape != tensor.shape:
            expected_shape, shape = tuple(tensor.shape), tuple(value.shape)
            msg = f"`{label}` must have shape {expected_shape} at {name!r}, got {shape}"
            raise ValueError(msg)
        both_float = value.is_floating_point() and tensor.is_floating_point()
        if value.dtype != tensor.dtype and not both_float:
            msg = f"`{label}` must have dtype {tensor.dtype} at {name!r}, got {value.dtype}"
            raise ValueError(msg)
    return [given[name] for name in expected]


def _kind(value: object) -> str:
    return str(value.dtype) if isinstance(value, Tensor) else type(value).__name__
