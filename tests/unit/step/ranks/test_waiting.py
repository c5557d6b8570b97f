"""Methods of torch that wait for other ranks are timed once, and keep their results."""

import pytest
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.nn.parallel import DistributedDataParallel

from mfwrap.collectives import Section, section_clock
from mfwrap.step.ranks.waiting import TimedCollective, time_method
from support.ranks.graphs import count_graphs


class Owner:
    """An object with a method that waits."""

    def wait(self, number: int, *, more: int = 0) -> tuple[Section, int]:
        """Return the section that the clock is in, and a sum."""
        return section_clock.switch(Section.WAITING), number + more


def test_a_timed_method_waits():
    """The time in the method is waiting time if somebody reads it; arguments and result stay."""
    owner = Owner()
    time_method(owner, "wait")
    timed = owner.wait
    time_method(owner, "wait")
    time_method(owner, "absent")

    assert owner.wait is timed
    assert owner.wait(1, more=2) == (Section.DATA, 3)
    section_clock.start_for(owner)
    assert owner.wait(1, more=2) == (Section.WAITING, 3)
    assert section_clock.switch(Section.DATA) is Section.DATA
    section_clock.stop_for(owner)
    assert isinstance(timed, TimedCollective)
    assert not hasattr(owner, "absent")


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (DistributedDataParallel, "_pre_forward"),
        (FSDPParamGroup, "unshard"),
        (FSDPParamGroup, "wait_for_unshard"),
    ],
)
def test_the_private_names_of_torch_are_there(kind, name):
    """This torch version has the methods whose time counts as waiting."""
    assert callable(getattr(kind, name))


@pytest.mark.slow
@pytest.mark.parametrize("place", ["inside", "outside", "reducer", "attached"])
def test_graphs_stay_the_same(two_ranks, place):
    """A reader of the times adds neither a graph nor a graph break to a compiled replica."""
    for unread, read in two_ranks.run(count_graphs, place):
        assert unread[0] == 1
        assert read == unread
