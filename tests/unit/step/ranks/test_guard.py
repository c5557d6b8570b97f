"""The cell compares the ranks before the first update, and watches them after it."""

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.testing._internal.distributed.fake_pg import FakeStore

from mfwrap import MFTrainOneStepCell, WithLossCell
from mfwrap.step.ranks.fsdp import ShardedParts
from mfwrap.step.ranks.guard import RankGuard, rank_guard
from support.ranks.guards import fail_alone, train_alone, train_apart, train_shards
from support.ranks.pool import RankPool
from support.stores import FakeStoreOfTorch214


def test_one_rank_needs_no_guard():
    """Without other ranks there is nothing to compare."""
    network = nn.Linear(2, 1)
    assert rank_guard(dict(network.named_parameters()), [], ShardedParts(network), dict) is None


@pytest.mark.parametrize("make_store", [FakeStore, FakeStoreOfTorch214])
def test_a_fake_process_group_needs_no_guard(make_store):
    """Torch's fake process group, in which large jobs are tried out, has no ranks to compare."""
    distributed.init_process_group("fake", store=make_store(), rank=0, world_size=4)
    try:
        network = WithLossCell(nn.Linear(2, 1), nn.MSELoss())
        cell = MFTrainOneStepCell(network, SGD(network.parameters(), lr=0.1))
        assert cell(torch.ones(2, 2), torch.ones(2, 1)).loss > 0
    finally:
        distributed.destroy_process_group()


def test_ranks_are_compared_before_the_first_update_only():
    """The facts are taken once, however many updates follow."""
    taken = []
    guard = RankGuard(None, lambda: taken.append("facts") or {})

    for _ in range(3):
        with guard.updating(ends=True):
            assert taken == ["facts"]


@pytest.mark.slow
def test_ranks_that_differ(two_ranks):
    """Before the first update, both ranks raise the same error."""
    first, second = two_ranks.run(train_apart)

    assert first == second
    assert "optimizer: lr of group 0 is 0.1 on rank 0 but 0.2 on rank 1" in first


@pytest.mark.slow
@pytest.mark.parametrize("name", ["cell", "loss scale cell", "attach"])
def test_networks_that_nothing_joins(tmp_path, name):
    """Ranks with different plain networks are refused at the latest in the second update."""
    with RankPool(2, tmp_path) as ranks:
        errors = ranks.run(train_alone, name)

    for rank, error in enumerate(errors):
        assert f"cannot train: rank {rank} trains `" in error
        assert f"float32[{1 + rank}, 2] and" in error
        assert f"but rank {1 - rank} trains `" in error


@pytest.mark.slow
def test_shards_over_some_of_the_ranks(tmp_path):
    """Two pairs of ranks share networks with ``fully_shard``: each pair is told of the other one.

    The ranks of a pair are compared, too.
    """
    with RankPool(4, tmp_path) as ranks:
        found = ranks.run(train_shards)

    for rank, (warning, error) in enumerate(found):
        first = rank // 2 * 2
        assert f"lr of group 0 is 0.1 on rank {first} but 0.2 on rank {first + 1}" in error
        assert f"rank {rank} trains `backbone.weight` float32[{1 + rank // 2}, 2]" in warning


def test_a_group_of_one_rank():
    """DistributedDataParallel over one rank needs no warning that a wrapper is missing."""
    distributed.init_process_group("fake", rank=0, world_size=2, store=distributed.HashStore())
    try:
        group = distributed.new_group([0])
        network = DistributedDataParallel(nn.Linear(2, 1), process_group=group)
        named = dict(network.named_parameters())
        guard = rank_guard(named, [network], ShardedParts(network), dict)
        # A warning would be an error here.
        with guard.updating(ends=True):
            assert not guard.is_checked
    finally:
        distributed.destroy_process_group()


def test_a_group_of_some_ranks():
    """Its ranks are compared; other ranks, which train without them, are only named."""
    store = distributed.HashStore()
    distributed.init_process_group("fake", rank=0, world_size=4, store=store)
    try:
        group = distributed.new_group([0, 1])
        network = DistributedDataParallel(nn.Linear(2, 1), process_group=group, init_sync=False)
        named = dict(network.named_parameters())
        guard = rank_guard(named, [network], ShardedParts(network), dict)
        assert isinstance(guard, RankGuard)
        guard.is_checked = True
        # A warning that a wrapper is missing would be an error here.
        with guard.updating(ends=True):
            pass
    finally:
        distributed.destroy_process_group()


@pytest.mark.slow
def test_a_rank_that_fails_alone(two_ranks):
    """If one rank raises, the error of the other rank gets a note with its number and error."""
    notes, own = two_ranks.run(fail_alone)

    assert own == "the batch is damaged"
    assert notes.startswith("Other ranks: rank 1 has raised ValueError in update ")
    assert notes.endswith(": the batch is damaged.")
