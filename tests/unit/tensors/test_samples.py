"""A hash of a few elements tells networks apart, and is of values, not of places."""

import pytest
import torch
from torch import nn

from mfwrap.tensors.samples import sampled_hash, tensors_of


def hash_of(network):
    """Return the hash of a network's tensors."""
    return sampled_hash(tensors_of(network))


def test_networks_are_told_apart():
    """A copy has the same hash; another network, a step and other statistics change it."""
    network = nn.Sequential(nn.Linear(100, 3), nn.BatchNorm1d(3))
    before = hash_of(network)
    other = nn.Sequential(nn.Linear(100, 3), nn.BatchNorm1d(3))
    assert hash_of(other) != before
    other.load_state_dict(network.state_dict())
    assert hash_of(other) == before

    network.eval()
    network(torch.randn(4, 100))
    assert hash_of(network) == before
    network.train()
    network(torch.randn(4, 100))
    assert hash_of(network) != before
    other(torch.ones(4, 100)).pow(2).sum().backward()
    torch.optim.SGD(other.parameters(), lr=1e-3).step()
    assert hash_of(other) != before


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool]
)
def test_the_layout_does_not_count(dtype):
    """A tensor of any dtype has the hash of its values, however they lie in memory."""
    values = (torch.arange(12).reshape(3, 4) % 3).to(dtype)
    strided = torch.stack([values, values], -1)[..., 0]
    assert not strided.is_contiguous()

    assert sampled_hash([strided]) == sampled_hash([values.clone()])
    assert sampled_hash([values]) != sampled_hash([values.reshape(4, 3)])
    assert sampled_hash([values]) != sampled_hash([torch.zeros_like(values)])


def test_tensors_that_cannot_be_read():
    """They count by their shapes."""
    hashes = {sampled_hash([torch.ones(size, device="meta")]) for size in (2, 2, 3)}
    assert len(hashes) == 2
    assert sampled_hash([torch.eye(3).to_sparse()]) == sampled_hash([torch.ones(3, 3).to_sparse()])
