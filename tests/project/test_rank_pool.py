"""The processes in which tests run ranks."""

import signal

import pytest

from support.ranks.pool import RankPool


def test_a_dead_rank_fails_one_test(tmp_path):
    """The error says how each rank has ended; the next program gets new processes."""
    with RankPool(2, tmp_path) as ranks:
        # Signal 0 does nothing; signal 1 is SIGHUP.
        with pytest.raises(RuntimeError, match=r"raise_signal: .*rank 1 was ended by SIGHUP"):
            ranks.run(signal.raise_signal)

        assert ranks.run(abs) == [0, 1]
