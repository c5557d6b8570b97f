"""Each rank gets the right values from mfwrap's collectives, and a single rank sends nothing."""

import pytest
import torch
from torch import distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

from mfwrap import collectives
from support.ranks.collectives import call_collectives, fail_together, own_tensor


@pytest.fixture
def sent(monkeypatch):
    """Replace torch's collectives, and return a list to which each call appends a name."""
    names = []
    for name in ("all_gather", "all_gather_object", "all_reduce", "broadcast", "gather"):
        monkeypatch.setattr(distributed, name, lambda *_, name=name, **__: names.append(name))
    return names


def check_one_rank():
    """Check that each collective returns this process's own values."""
    own = call_collectives(0)

    assert (own["num_ranks"], own["this_rank"]) == (1, 0)
    for name in ("added", "received"):
        assert torch.equal(own[name], own_tensor(0))
    assert (own["any_first"], own["any_none"]) == (True, False)
    for name in ("on_all", "on_main"):
        assert torch.equal(own[name], own_tensor(0)[None])
    assert own["objects"] == [{"rank": 0}]


def test_without_a_process_group_nothing_is_sent(sent):
    """Without a process group there is one rank, which keeps its own values."""
    check_one_rank()

    assert sent == []


def test_a_torch_without_distributed(monkeypatch, sent):
    """A build of torch without torch.distributed counts as one rank, too."""
    monkeypatch.setattr(distributed, "is_available", lambda: False)
    monkeypatch.delattr(distributed, "is_initialized")

    check_one_rank()

    assert sent == []


def test_a_group_of_one_sends_nothing(sent):
    """A group of one rank, as a launcher with one process creates it, sends no messages."""
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        check_one_rank()
    finally:
        distributed.destroy_process_group()

    assert sent == []


def test_gathered_tensors_are_copies():
    """A caller may change a gathered tensor without changing its own tensor."""
    own = own_tensor(0)

    collectives.gather_on_all(own).zero_()
    collectives.gather_on_main(own).zero_()

    assert torch.equal(own, own_tensor(0))


@pytest.mark.slow
def test_two_ranks(two_ranks):
    """On two ranks, sums, broadcasts, flags and gathers have the right values on each rank."""
    first, second = two_ranks.run(call_collectives)
    both = torch.stack([own_tensor(0), own_tensor(1)])

    for rank, own in enumerate((first, second)):
        assert (own["num_ranks"], own["this_rank"]) == (2, rank)
        assert torch.equal(own["added"], both.sum(dim=0))
        assert torch.equal(own["received"], both[0])
        assert (own["any_first"], own["any_none"]) == (True, False)
        assert torch.equal(own["on_all"], both)
        assert own["objects"] == [{"rank": 0}, {"rank": 1}]
    assert torch.equal(first["on_main"], both)
    assert second["on_main"] is None


def test_one_rank_raises_its_own_error():
    """Without other ranks, an error leaves the block as it is, with its traceback."""
    with pytest.raises(ValueError, match="own") as caught, collectives.raising_together():
        raise ValueError("own")  # noqa: EM101  (a test's error)

    assert caught.traceback[-1].path.name == "test_calls.py"
    assert fail_together(0, {}) is None


@pytest.mark.slow
def test_all_ranks_raise_the_error_of_one(two_ranks):
    """An error on one rank is raised on all ranks; of several errors, that of the lowest rank."""
    missing = ("FileNotFoundError", "[Errno 2] of rank 1: 'file'")
    first, last = ("ValueError", "of rank 0"), ("ValueError", "of rank 1")

    assert two_ranks.run(fail_together, {}) == [None, None]
    assert two_ranks.run(fail_together, {0: "ValueError"}) == [first, first]
    assert two_ranks.run(fail_together, {1: "ValueError"}) == [last, last]
    assert two_ranks.run(fail_together, {0: "ValueError", 1: "OSError"}) == [first, first]
    assert two_ranks.run(fail_together, {1: "OSError"}) == [missing, missing]
    own = [("RuntimeError", "OwnError: 1: own"), ("OwnError", "1: own")]
    assert two_ranks.run(fail_together, {1: "OwnError"}) == own
