"""Ranks with different gradients agree on one sum of squares; other ranks need no agreement."""

import math

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

from mfwrap.step.ranks.agreement import Agreement, RankAgreement, agreement_of
from support.ranks.collectives import agreed_mean


@pytest.fixture
def four_ranks():
    """Run as rank 0 of 4 in a fake process group, which sends nothing."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield
    distributed.destroy_process_group()


def parts_of(network: nn.Module) -> list[DistributedDataParallel]:
    """Return the DistributedDataParallel parts of a network."""
    return [part for part in network.modules() if isinstance(part, DistributedDataParallel)]


def agreement(network: nn.Module) -> Agreement | None:
    """Return the agreement that a network's ranks need."""
    return agreement_of(parts_of(network), list(network.parameters()))


def test_one_process_needs_no_agreement():
    """A network without DistributedDataParallel exchanges no messages."""
    assert agreement(nn.Linear(2, 2)) is None


@pytest.mark.usefixtures("four_ranks")
def test_reduced_gradients_need_no_agreement():
    """Ranks with reduced gradients, which are bitwise equal, need no agreement."""
    assert agreement(DistributedDataParallel(nn.Linear(2, 2))) is None


@pytest.mark.usefixtures("four_ranks")
def test_a_parameter_outside_of_the_part_needs_agreement():
    """A trainable parameter outside DistributedDataParallel needs agreement."""
    network = nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)), nn.Linear(2, 2))

    assert isinstance(agreement(network), RankAgreement)


def test_one_rank_needs_no_agreement():
    """A process group of one rank needs no agreement, even on a parameter outside the part."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        part = DistributedDataParallel(nn.Linear(2, 2))
        assert agreement(nn.Sequential(part, nn.Linear(2, 2))) is None
    finally:
        distributed.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
def test_a_frozen_parameter_outside_of_the_part_needs_none():
    """A frozen parameter outside DistributedDataParallel needs no agreement."""
    outside = nn.Linear(2, 2).requires_grad_(requires_grad=False)

    assert agreement(nn.Sequential(DistributedDataParallel(nn.Linear(2, 2)), outside)) is None


@pytest.mark.usefixtures("four_ranks")
def test_an_ignored_parameter_needs_agreement():
    """A parameter that DistributedDataParallel ignores needs agreement."""
    network = nn.Linear(2, 2)
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(network, ["bias"])

    assert isinstance(agreement(DistributedDataParallel(network)), RankAgreement)


@pytest.mark.parametrize(
    ("squares", "expected"),
    [([1.0, 3.0], 2.0), ([0.1, 0.1], 0.1), ([3e38, 3e38], 3e38), ([1.0, math.inf], math.inf)],
    ids=["different", "equal", "large", "overflow on one rank"],
)
def test_ranks_agree_on_the_mean(two_ranks, squares, expected):
    """The ranks' mean is exact for equal sums, finite for large sums, and inf if a sum is inf."""
    for mean in two_ranks.run(agreed_mean, squares):
        assert torch.equal(mean, torch.tensor(expected))
