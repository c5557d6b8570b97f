"""A SIGTERM after another rank has died, as torchrun sends it, saves nothing and hangs nowhere."""

import signal

import pytest

from support.ranks.processes import run_ranks
from support.ranks.stops import train_until_one_dies


@pytest.mark.slow
def test_a_signal_after_a_death(tmp_path, capfd):
    """The rank that remains fails with an error, and leaves the last complete checkpoint."""
    statuses = run_ranks(tmp_path, train_until_one_dies)

    assert statuses == [1, -signal.SIGKILL]
    assert "training was asked to stop, but rank 1 did not answer within 10 s" in (
        capfd.readouterr().err
    )
    assert [path.name for path in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-2"]
