"""Let fused optimizers update this rank's shards of distributed parameters."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mfwrap.tensors.shards import is_distributed, local_tensor, placed_as

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def holds_distributed(optimizer: Optimizer) -> bool:
    """Return whether any of an optimizer's parameters is distributed over ranks."""
    return any(is_distributed(p) for group in optimizer.param_groups for p in group["params"])


@contextlib.contextmanager
def on_local_shards(optimizer: Optimizer) -> Iterator[None]:
    """Within the block, give the optimizer this rank's shards instead of distributed tensors.

    torch's fused SGD and Adagrad do not accept distributed tensors. No fused kernel accepts
    distributed tensors together with plain ones, or distributed tensors of two meshes.

    A fused update works element by element, and the shards share the storage of the distributed
    tensors. So an update of the shards has the same result. After the block, parameters and state
    are distributed again, as checkpoints need them. Hooks of the optimizer's step see the shards.

    Args:
        optimizer: Optimizer whose state tensors, except for ``step``, have the shapes of their
            parameters.
    """
    groups = [list(group["params"]) for group in optimizer.param_groups]
    shards = {p: _shard_of(p) for held in groups for p in held if is_distributed(p)}
    state: Any = optimizer.state
    for parameter, shard in shards.items():
        if parameter in state:
            state[shard] = {name: _local(value) for name, value in state[parameter].items()}
    for group, held in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [shards.get(parameter, parameter) for parameter in held]
    try:
        yield
    finally:
        for group, held in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = held
        for parameter, shard in shards.items():
            for name, value in state.pop(shard, {}).items():
                # State that was distributed before the block shares its storage with the shard's
                # state, so it is up to date. Only state that the update has created must be
                # distributed and stored under the parameter.
                if not is_distributed(state[parameter].get(name)):
                    state[parameter][name] = _placed_state(name, value, parameter)


@torch.no_grad()
def _shard_of(parameter: Tensor) -> Tensor:
    # Detach the shard before setting its `grad`: `to_local` may return the same tensor each time,
    # and other users of that tensor must not see this `grad`.
    shard = local_tensor(parameter).detach()
    if parameter.grad is not None:
        shard.grad = local_tensor(parameter.grad)
    return shard


def _local(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, Tensor) else value


def _placed_state(name: str, value: Any, parameter: "DTensor") -> Any:
    """Distribute new optimizer state like its parameter; leave the entry ``step`` as it is."""
    return value if name == "step" or not isinstance(value, Tensor) else placed_as(value, parameter)
