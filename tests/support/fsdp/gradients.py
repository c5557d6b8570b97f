"""Program that each rank runs to differentiate by sharded weights."""

from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.fsdp import fully_shard

from mfwrap import grad, value_and_grad
from support.small_networks import Classifier, labelled_batches

__all__ = ["differentiate_again", "differentiate_shards"]


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


def differentiate_again(rank: int) -> dict[str, Any]:
    """Differentiate by shards where the gradients of whole weights have a graph.

    Returns:
        Errors of nested gradient functions; and, for an input that requires gradients, the
        gradients by shards, those by whole weights, and the ``grad`` of the input.
    """
    inputs, labels = labelled_batches(1)[0]
    torch.manual_seed(0)
    plain = Classifier()
    torch.manual_seed(0)
    network = Classifier()
    fully_shard(network)
    weights = list(network.parameters())

    def of_inputs(x: Tensor) -> Tensor:
        return grad(network)(x, labels).square().sum()

    def of_weights(x: Tensor) -> Tensor:
        gradients = grad(lambda x: network(x, labels), None, weights)(x)
        return torch.stack([each.full_tensor().square().sum() for each in gradients]).sum()

    errors = []
    for nested in (grad(of_inputs, None, weights), grad(of_inputs), grad(of_weights)):
        try:
            nested(inputs)
        except RuntimeError as error:
            errors.append(str(error))

    source = inputs.clone().requires_grad_()
    by_x, by_weights = grad(network, 0, weights)(source * 1, labels)
    plain(inputs.requires_grad_(), labels).backward()
    return {
        "errors": errors,
        "found": [by_x, *[each.full_tensor() for each in by_weights]],
        "expected": [inputs.grad, *[each.grad for each in plain.parameters()]],
        "grad of the input": source.grad,
    }
