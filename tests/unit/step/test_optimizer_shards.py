"""A fused update of shards is the update of the distributed parameters."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard, distribute_tensor, init_device_mesh
from torch.optim import SGD, Adagrad, AdamW

from mfwrap.step.optimizer_shards import holds_distributed, on_local_shards

KINDS = {
    "Adagrad": lambda held: Adagrad(held, lr=0.1, fused=True),
    "AdamW": lambda held: AdamW(held, lr=0.1, fused=True),
    "SGD": lambda held: SGD(held, lr=0.1, momentum=0.9, fused=True),
}


def weights():
    """Return two weights."""
    draw = torch.Generator().manual_seed(0)
    return [torch.randn(4, 3, generator=draw), torch.randn(5, generator=draw)]


@pytest.mark.usefixtures("_one_rank")
@pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)
def test_updates_of_shards(make):
    """Distributed weights beside plain ones get torch's updates; their state is distributed."""
    mesh = init_device_mesh("cpu", (1,))
    plain = [nn.Parameter(each) for each in weights()]
    split = nn.Parameter(distribute_tensor(weights()[0], mesh, [Shard(0)]))
    mixed = [split, nn.Parameter(weights()[1])]
    expected, ours = make(plain), make(mixed)
    assert holds_distributed(ours)
    assert not holds_distributed(expected)

    for step in range(3):
        for each, other in zip(plain, mixed, strict=True):
            each.grad = torch.full_like(each, step + 1.0)
            other.grad = torch.full_like(other, step + 1.0)
        expected.step()
        with on_local_shards(ours):
            ours.step()

    assert ours.param_groups[0]["params"] == mixed
    assert set(ours.state) == set(mixed)
    assert torch.equal(split.full_tensor(), plain[0])
    assert torch.equal(mixed[1], plain[1])
    for name, value in ours.state[split].items():
        assert isinstance(value, DTensor) == (name != "step")
        whole = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(whole, expected.state[plain[0]][name])
