"""Find non-finite tensors: weights, buffers and optimizer states."""

import math
from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor, nn

from mfwrap.tensors.norms import as_real
from mfwrap.tensors.shards import local_tensors
from mfwrap.tensors.wrappers import plain_name, unwrapped_network, unwrapped_optimizer


@torch.no_grad()
def non_finite(tensors: Mapping[str, Tensor]) -> dict[str, float]:
    """Return which tensors have a non-finite element on this rank.

    Reads each tensor once. Synchronizes once per device and dtype.

    Args:
        tensors: Tensors by name, of any shape, dtype and device. Integers are finite.

    Returns:
        NaN for each tensor with a NaN, ``inf`` for each tensor with infinities but no NaN. Finite
        tensors are left out.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], dict[str, Tensor]] = {}
    for name, tensor in zip(tensors, local_tensors(tensors.values()), strict=True):
        if tensor.numel() and (tensor.is_floating_point() or tensor.is_complex()):
            real = as_real(tensor)
            # torch has no norms of 8-bit numbers.
            real = real.float() if real.dtype.itemsize == 1 else real
            by_kind.setdefault((real.device, real.dtype), {})[name] = real
    found: dict[str, float] = {}
    for members in by_kind.values():
        # The largest magnitude is NaN if any element is NaN.
        largest = [torch.linalg.vector_norm(each, math.inf) for each in members.values()]
        found |= dict(zip(members, torch.stack(largest).tolist(), strict=True))
    return {name: found[name] for name in tensors if not math.isfinite(found.get(name, 0.0))}


def bad_weights(network: nn.Module) -> tuple[str, ...]:
    """Return the names of non-finite parameters, trainable or frozen, in the network's order."""
    named = unwrapped_network(network).named_parameters()
    return tuple(non_finite({plain_name(name): parameter for name, parameter in named}))


def bad_optimizer_states(network: nn.Module, optimizer: Any) -> tuple[str, ...]:
    """Return the non-finite tensors in an optimizer's state, such as ``"exp_avg of fc.weight"``.

    Args:
        network: Network with the names of the optimizer's parameters.
        optimizer: Optimizer, with or without accelerate's wrapper.
    """
    named = unwrapped_network(network).named_parameters()
    names = {id(parameter): plain_name(name) for name, parameter in named}
    states = {
        f"{key} of {names.get(id(parameter), f'parameter {number} outside the network')}": value
        for number, (parameter, state) in enumerate(unwrapped_optimizer(optimizer).state.items())
        if isinstance(state, Mapping)
        for key, value in state.items()
        if isinstance(value, Tensor)
    }
    return tuple(non_finite(states))


@final
class BufferWatch:
    """Find the buffers of a network that have become non-finite.

    Some buffers hold infinities on purpose: a mask, or the initial range of an observer. A buffer
    that holds an infinity at construction therefore counts as non-finite only if it holds a NaN.

    Args:
        network: Network to watch, with or without wrappers. Its buffers are read at construction,
            which synchronizes with the device.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        found = non_finite(self._buffers())
        self._may_be_infinite = frozenset(
            name for name, value in found.items() if value == math.inf
        )
        self._reported: frozenset[str] = frozenset()

    def _buffers(self) -> dict[str, Tensor]:
        named = unwrapped_network(self._network).named_buffers()
        return {plain_name(name): buffer for name, buffer in named}

    def bad(self) -> tuple[str, ...]:
        """Return the names of non-finite buffers, in the network's order; synchronizes."""
        found = non_finite(self._buffers()).items()
        return tuple(n for n, v in found if math.isnan(v) or n not in self._may_be_infinite)

    def newly_bad(self) -> tuple[str, ...]:
        """Return the buffers that were not `bad` in the previous call; synchronizes."""
        bad = self.bad()
        fresh = tuple(name for name in bad if name not in self._reported)
        self._reported = frozenset(bad)
        return fresh
