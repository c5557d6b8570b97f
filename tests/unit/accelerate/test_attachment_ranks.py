"""An attached loop compares the ranks before the first update of each training."""

import pytest

from support.ranks.guards import loop_apart


@pytest.mark.slow
def test_ranks_that_differ(two_ranks):
    """After `free_memory`, ranks that differ raise the same error before the first update."""
    first, second = two_ranks.run(loop_apart)

    assert first == second
    assert "optimizer: lr of group 0 is 0.1 on rank 0 but 0.2 on rank 1" in first
