"""The cell and attached loops compare the ranks before the first update, and watch them after."""

import pytest
from torch import nn

from mfwrap.step.fsdp import ShardedParts
from mfwrap.step.rank_guard import rank_guard
from support.ranks.guards import LOOPS, fail_alone, train_apart


def test_one_rank_needs_no_guard():
    """Without other ranks there is nothing to compare."""
    assert rank_guard([], ShardedParts(nn.Linear(2, 1)), dict) is None


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_ranks_that_differ(two_ranks, name):
    """Before the first update, both ranks raise the same error."""
    first, second = two_ranks.run(train_apart, name)

    assert first == second
    assert "optimizer: lr of group 0 is 0.1 on rank 0 but 0.2 on rank 1" in first


@pytest.mark.slow
def test_a_rank_that_fails_alone(two_ranks):
    """If one rank raises, the error of the other rank gets a note with its number and error."""
    notes, own = two_ranks.run(fail_alone)

    assert own == "the batch is damaged"
    assert notes.startswith("Other ranks: rank 1 has raised ValueError in update ")
    assert notes.endswith(": the batch is damaged.")
