"""A small network of attention whose logits a test can compute by hand."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Attention", "AttentionNetwork", "logits_by_hand"]


class Attention(nn.Module):
    """Causal attention with separate projections; a key head may serve several query heads."""

    def __init__(self, num_heads: int, num_keys: int, head_dim: int, *, bias: bool) -> None:
        super().__init__()
        self.head_dim = head_dim
        size = num_heads * head_dim
        self.q_proj = nn.Linear(size, size, bias=bias)
        self.k_proj = nn.Linear(size, num_keys * head_dim, bias=bias)
        self.v_proj = nn.Linear(size, num_keys * head_dim, bias=bias)

    def heads(self, projected: Tensor) -> Tensor:
        """Return the projected inputs with shape ``(batch, heads, length, head_dim)``."""
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def forward(self, inputs: Tensor) -> Tensor:
        layers = (self.q_proj, self.k_proj, self.v_proj)
        projected = (self.heads(layer(inputs)) for layer in layers)
        mixed = functional.scaled_dot_product_attention(*projected, is_causal=True, enable_gqa=True)
        return mixed.transpose(1, 2).flatten(2)


class AttentionNetwork(nn.Module):
    """Two layers of `Attention`; the loss is the mean square of the output."""

    def __init__(self, num_keys: int = 2, *, bias: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Attention(4, num_keys, 3, bias=bias) for _ in range(2))

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = inputs + layer(inputs)
        return inputs.square().mean()


@torch.no_grad()
def logits_by_hand(network: AttentionNetwork, inputs: Tensor) -> list[Tensor]:
    """Return the largest causal logit of each head of each layer."""
    found = []
    for layer in network.layers:
        query, key = layer.heads(layer.q_proj(inputs)), layer.heads(layer.k_proj(inputs))
        key = key.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        logits = query @ key.transpose(-1, -2) / math.sqrt(layer.head_dim)
        length = inputs.shape[1]
        reaches = torch.ones(length, length, dtype=torch.bool).tril()
        found.append(logits.masked_fill(~reaches, -torch.inf).amax(dim=(0, 2, 3)))
        inputs = inputs + layer(inputs)
    return found
