"""Let an optimizer whose update is elementwise run on the shards themselves."""

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from mfwrap.tensors.shards import is_distributed, local_tensor

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["holds_distributed", "on_local_shards"]


def holds_distributed(optimizer: Optimizer) -> bool:
    """Return whether any of an optimizer's parameters is distributed over ranks."""
    return any(is_distributed(p) for group in optimizer.param_groups for p in group["params"])


@contextlib.contextmanager
def on_local_shards(optimizer: Optimizer) -> Iterator[None]:
    """Let the optimizer see what this rank holds of its parameters, gradients and state.

    torch's fused SGD and Adagrad know no distributed tensors, and no fused kernel takes them
    together with others or from two meshes; on the shards, which share the storage, every one does
    what it does on whole tensors, element by element. Outside of the block parameters and state
    are distributed as before, for checkpoints; hooks of the optimizer's step see the shards.

    Args:
        optimizer: One whose state, but for ``step``, has its parameters' shapes.
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
                # What was distributed before shares its storage, and stays itself.
                if not is_distributed(state[parameter].get(name)):
                    state[parameter][name] = _placed(name, value, parameter)


@torch.no_grad()
def _shard_of(parameter: Tensor) -> Tensor:
    # Detached, so that it is this call's own: torch may keep one for all calls.
    shard = local_tensor(parameter).detach()
    if parameter.grad is not None:
        shard.grad = local_tensor(parameter.grad)
    return shard


def _local(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, Tensor) else value


def _placed(name: str, value: Any, parameter: "DTensor") -> Any:
    """Return new state as distributed as its parameter; a number of steps is the same for all."""
    if name == "step" or not isinstance(value, Tensor):
        return value
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  (imported already)

    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
