"""Programs that each rank runs to update sharded weights."""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from mfwrap import AdamWeightDecay, MFTrainOneStepCell
from mfwrap.optimizers.qk_clip import QKClip
from support.attention import AttentionNetwork

__all__ = ["clip_on_ranks", "step_half_precision_shards"]


def clip_on_ranks(rank: int, num_ranks: int) -> list[Tensor]:
    """Train two updates on this rank's rows of a batch, and return the whole weights.

    Only the rows of one rank have large logits.
    """
    rows = torch.randn(4, 5, 12, generator=torch.Generator().manual_seed(0))
    rows[0] *= 3
    network = AttentionNetwork(bias=False)
    if num_ranks > 1:
        fully_shard(network)
    optimizer = AdamW(network.parameters(), lr=0.01, fused=True)
    QKClip(optimizer, network, 0.5)
    cell = MFTrainOneStepCell(network, optimizer)
    for _ in range(2):
        cell(rows.chunk(num_ranks)[rank])
    weights = [parameter.detach() for parameter in network.parameters()]
    return [each.full_tensor() if num_ranks > 1 else each for each in weights]


def step_half_precision_shards(rank: int) -> list[tuple[Tensor, Tensor]]:
    """Step `AdamWeightDecay` three times without a cell, on whole weights and on shards.

    Returns:
        Each weight of a whole network, and the same weight put together from the shards, with and
        without the fused kernel.
    """
    del rank
    pairs: list[tuple[Tensor, Tensor]] = []
    for fused in (True, False):
        networks = []
        for is_sharded in (False, True):
            torch.manual_seed(0)
            network = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 3)).bfloat16()
            if is_sharded:
                fully_shard(network)
            optimizer = AdamWeightDecay(network.parameters(), lr=0.01, fp32_state=True, fused=fused)
            for _ in range(3):
                network(torch.ones(2, 4, dtype=torch.bfloat16)).float().square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            networks.append(network)
        whole, sharded = (network.parameters() for network in networks)
        pairs += [
            (a.detach(), b.detach().full_tensor()) for a, b in zip(whole, sharded, strict=True)
        ]
    return pairs
