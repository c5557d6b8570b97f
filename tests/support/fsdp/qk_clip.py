"""Program that each rank runs to clip the sharded weights of an attention."""

import torch
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW

from mfwrap import MFTrainOneStepCell
from mfwrap.optimizers.qk_clip import QKClip
from support.attention import AttentionNetwork

__all__ = ["clip_on_ranks"]


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
