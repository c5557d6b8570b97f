"""The processes in which tests run ranks."""

import os

import pytest

from support.ranks.pool import RankPool


@pytest.mark.slow
def test_a_dead_rank_fails_one_test(tmp_path):
    """The error says how each rank has ended; the next program gets new processes."""
    with RankPool(2, tmp_path) as ranks:
        with pytest.raises(RuntimeError, match="rank 0 exited with 0, rank 1 exited with 1"):
            ranks.run(os._exit)

        assert ranks.run(abs) == [0, 1]
