"""A network of torch alone, and ways to distribute it over the ranks."""

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "Network",
    "in_ddp",
    "in_fsdp",
    "in_hsdp",
    "in_sequence_parallel",
    "in_tensor_parallel",
    "in_tensor_parallel_and_fsdp",
    "tensor_parallel",
]

WIDTH = 6
"""Number of features of an input and of a target."""


class Block(nn.Module):
    """A residual block; its hidden size is divisible by 2, 3 and 4."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Network(nn.Module):
    """A network of two blocks whose loss is the mean squared error over all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, 12)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(12)
        self.last = nn.Linear(12, WIDTH)

    def forward(self, inputs: Tensor, targets: Tensor, factor: float = 1.0) -> Tensor:
        """Return the loss of inputs and targets of shape ``(rows, tokens, WIDTH)``."""
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return nn.functional.mse_loss(self.last(self.norm(hidden)), targets) * factor


def in_ddp(network: nn.Module) -> nn.Module:
    """Wrap a network in DistributedDataParallel."""
    return DistributedDataParallel(network)


def in_fsdp(network: nn.Module) -> nn.Module:
    """Shard each block, and the rest of the network, over all ranks."""
    return _sharded(network, init_device_mesh("cpu", (distributed.get_world_size(),)))


def in_hsdp(network: nn.Module) -> nn.Module:
    """Shard over half of the ranks, and replicate over the two halves."""
    world = distributed.get_world_size()
    shape = (2, world // 2) if world > 1 else (1, 1)
    return _sharded(network, init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))


def in_tensor_parallel(network: nn.Module) -> nn.Module:
    """Split the linear layers of the blocks over all ranks, by columns and by rows."""
    return tensor_parallel(network, init_device_mesh("cpu", (distributed.get_world_size(),)))


def in_sequence_parallel(network: nn.Module) -> nn.Module:
    """Split the blocks' linear layers, and the tokens between these layers, over all ranks."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in network.blocks:
        parallelize_module(
            block,
            mesh,
            {
                "norm": SequenceParallel(),
                "up": ColwiseParallel(input_layouts=Shard(1)),
                "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
            },
        )
        whole, split = {"input_layouts": Replicate()}, {"desired_input_layouts": Shard(1)}
        parallelize_module(block, mesh, PrepareModuleInput(**whole, **split))
        back: dict[str, Any] = {"output_layouts": Shard(1), "desired_output_layouts": Replicate()}
        parallelize_module(block, mesh, PrepareModuleOutput(**back))
    return network


def in_tensor_parallel_and_fsdp(network: nn.Module) -> nn.Module:
    """Split the linear layers over two neighboring ranks, and shard over the other ranks."""
    world = distributed.get_world_size()
    shape = (world // 2, 2) if world > 1 else (1, 1)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("fsdp", "tp"))
    return _sharded(tensor_parallel(network, mesh["tp"]), mesh["fsdp"])


def _sharded(network: nn.Module, mesh: DeviceMesh) -> nn.Module:
    for block in network.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(network, mesh=mesh)


def tensor_parallel(network: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Split the linear layers of the blocks over a mesh, by columns and by rows."""
    for block in network.blocks:
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return network
