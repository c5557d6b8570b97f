"""Ranks that train different parameters without each other do not do so in silence."""

import pytest
from torch import distributed, nn

from mfwrap.collectives import Announcements
from mfwrap.step.ranks.others import OtherRanks


@pytest.fixture
def announced():
    """Return the announcements of two ranks, which do not wait for each other."""
    store = distributed.HashStore()
    return [Announcements(store, rank, 2, seconds_to_follow=0.0) for rank in range(2)]


def others(announced, network, *, are_refused=True):
    """Return the comparison of one rank."""
    return OtherRanks(dict(network.named_parameters()), announced, are_refused=are_refused)


def test_copies_are_warned_about(announced):
    """Ranks that train copies of one network get a warning, and are not compared again."""
    for rank, agrees in zip(announced, (False, True), strict=True):
        with pytest.warns(UserWarning, match="each rank trains, clips and skips alone"):
            assert others(rank, nn.Linear(2, 1)).compare(ends=True) is agrees


@pytest.mark.filterwarnings("ignore:no wrapper reduces")
def test_frozen_parameters_are_not_compared(announced):
    """Ranks that train the same parameters may have different frozen ones beside them."""
    frozen = nn.Linear(1, 1).requires_grad_(requires_grad=False)
    assert not others(announced[0], nn.Sequential(nn.Linear(2, 1))).compare(ends=True)

    assert others(announced[1], nn.Sequential(nn.Linear(2, 1), frozen)).compare(ends=True)


@pytest.mark.filterwarnings("ignore:no wrapper reduces")
def test_stages_are_refused(announced):
    """The later rank refuses its first update, and the earlier rank its second one."""
    first = others(announced[0], nn.Linear(2, 3))
    second = others(announced[1], nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)))
    assert not first.compare(ends=True)

    with pytest.raises(RuntimeError) as refused:
        second.compare(ends=True)
    assert str(refused.value) == (
        "cannot train: rank 1 trains `0.weight` float32[2, 3] and `0.bias` float32[2] and 2 more, "
        "but rank 0 trains `weight` float32[3, 2] and `bias` float32[3], and each would clip and "
        "skip by its own gradients alone; pass the schedule of torch.distributed.pipelining to "
        "MFTrainOneStepCell if these are stages of a pipeline, or start independent trainings "
        "without a common process group"
    )
    with pytest.raises(RuntimeError, match=r"but rank 1 trains `0\.weight`"):
        first.compare(ends=True)


@pytest.mark.filterwarnings("ignore:no wrapper reduces")
def test_second_networks_that_differ(announced):
    """A later network that differs is reported, though the ranks have trained a common one."""
    for rank in announced:
        others(rank, nn.Linear(2, 1)).compare(ends=True)
    first = others(announced[0], nn.Linear(2, 3))
    assert not first.compare(ends=True)

    with pytest.raises(RuntimeError, match=r"rank 1 trains `weight` float32\[4, 2\] and"):
        others(announced[1], nn.Linear(2, 4)).compare(ends=True)
    with pytest.raises(RuntimeError, match=r"but rank 1 trains `weight` float32\[4, 2\] and"):
        first.compare(ends=True)


@pytest.mark.filterwarnings("ignore:no wrapper reduces")
def test_a_rank_that_trains_alone_looks_seldom(announced):
    """Until the other rank trains, the ranks are compared in updates 1, 2, 4, 8, ..."""
    first = others(announced[0], nn.Linear(2, 3))
    for _ in range(2):
        assert not first.compare(ends=False)
        assert not first.compare(ends=True)
    announced[1].announce("b", "`b` float32[1]")

    assert not first.compare(ends=True)
    with pytest.raises(RuntimeError, match="rank 1 trains `b`"):
        first.compare(ends=True)


def test_groups_of_ranks_are_only_told(announced, caplog):
    """Ranks that exchange gradients within groups may train different networks."""
    announced[0].announce("a", "`a` float32[1]")

    assert others(announced[1], nn.Linear(2, 1), are_refused=False).compare(ends=True)
    assert "rank 0 trains `a` float32[1]: they clip and skip without each other" in caplog.text


@pytest.mark.filterwarnings("ignore:no wrapper reduces")
def test_a_training_survives_the_end_of_the_store():
    """An independent training goes on if the process that hosts the store has ended."""
    host = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    client = distributed.TCPStore("localhost", host.port, is_master=False)
    alone = others(Announcements(client, 1, 2), nn.Linear(2, 1))
    assert not alone.compare(ends=True)
    del host

    assert alone.compare(ends=True)
