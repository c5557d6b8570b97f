"""Context parallelism: each rank has a part of the tokens of every row."""

from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.experimental import context_parallel
from torch.nn import functional

from support.layouts import networks
from support.layouts.layout import Layout

__all__ = ["ContextParallel", "attend_by_ring"]


class Attention(nn.Module):
    """Causal attention with one head, to the keys and values of all ranks."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.projections = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = self.projections(hidden).chunk(3, dim=-1)
        first, number = 0, query.shape[1]
        if distributed.is_initialized() and distributed.get_world_size() > 1:
            first = distributed.get_rank() * number
            key, value = _gathered(key), _gathered(value)
        positions = torch.arange(first, first + number)
        mask = positions[:, None] >= torch.arange(key.shape[1])
        return hidden + self.output(
            functional.scaled_dot_product_attention(query, key, value, mask)
        )


def _gathered(tokens: Tensor) -> Tensor:
    """Return the tokens of all ranks; in backward, each rank gets the gradients from all ranks."""
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    parts = DTensor.from_local(tokens.contiguous(), mesh, [Shard(1)])
    return parts.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


class AttentionNetwork(networks.Network):
    """A network with attention before each block."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(Attention(), block) for block in self.blocks]
        self.blocks = nn.ModuleList(blocks)


class ContextParallel(Layout):
    """Causal attention over tokens that the ranks share, with `fully_shard` over the same ranks."""

    local_norms = "of the rank's tokens"

    def whole_network(self) -> nn.Module:
        """Return a network with attention."""
        torch.manual_seed(0)
        return AttentionNetwork()

    def batch(self, number: int, rank: int) -> dict[str, Any]:
        """Return this rank's tokens of all rows."""
        world = distributed.get_world_size()
        whole = self.whole_batch(number).items()
        return {name: tensor.chunk(world, dim=1)[rank] for name, tensor in whole}


def attend_by_ring(rank: int) -> str:
    """Try torch's own context parallelism; return the error."""
    del rank
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    query, key, value = (torch.randn(2, 2, 8, 4) for _ in range(3))
    try:
        # Within the block, torch replaces the function in `torch.nn.functional`.
        with context_parallel(mesh, buffers=[query, key, value], buffer_seq_dims=[2, 2, 2]):
            functional.scaled_dot_product_attention(query, key, value, is_causal=True)
    except NotImplementedError as error:
        return str(error)
    return "it runs"
