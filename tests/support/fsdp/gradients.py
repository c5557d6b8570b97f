"""Program that each rank runs to differentiate by sharded weights."""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard

from mfwrap import value_and_grad
from support.small_networks import Classifier, labelled_batches

__all__ = ["differentiate_shards"]


def differentiate_shards(rank: int) -> dict[str, Any]:
    """Return the gradients by shards, and the mean over ranks of those by whole weights."""
    [batch] = labelled_batches(1, seed=rank)
    torch.manual_seed(0)
    plain = Classifier()
    plain(*batch).backward()
    expected = [weight.grad / distributed.get_world_size() for weight in plain.parameters()]
    for mean in expected:
        distributed.all_reduce(mean)

    torch.manual_seed(0)
    network = Classifier()
    fully_shard(network.layers[0])
    fully_shard(network)
    weights = list(network.parameters())
    marks = [torch.ones_like(weight) for weight in weights]
    for weight, mark in zip(weights, marks, strict=True):
        weight.grad = mark

    def function(*inputs: Tensor) -> Tensor:
        return network(*inputs)

    found = {}
    for name, fn in {"network": network, "function": function}.items():
        _, gradients = value_and_grad(fn, None, weights)(*batch)
        found[name] = [gradient.full_tensor() for gradient in gradients]
    kept = all(weight.grad is mark for weight, mark in zip(weights, marks, strict=True))
    return {"expected": expected, **found, "kept": kept}
