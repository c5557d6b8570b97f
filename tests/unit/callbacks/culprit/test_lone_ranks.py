"""What one rank finds alone starts no collective: the other ranks would not take part in it."""

import pytest

from mfwrap.callbacks.culprit.anomaly_log import KINDS
from support.ranks.lone_anomalies import (
    LONE,
    explain_overflow,
    find_alone,
    find_together,
    load_alone,
    raise_rate,
)
from support.spoilt.blocks import records_of


def test_each_kind_is_tested():
    """Only an overflow is known to all ranks, and two checks of the hardware have their own tests.

    `ReplicaCheck` compares replicas on all ranks, and `RecomputeCheck` this rank with itself.
    """
    others = {"gradient_not_finite", "replicas_differ", "recompute_differs"}
    assert LONE.keys() == KINDS.keys() - others


@pytest.mark.parametrize("kind", LONE)
def test_a_rank_that_finds_an_anomaly_alone(kind, two_ranks):
    """The rank records it as its own, and the other rank goes on."""
    assert two_ranks.run(find_alone, kind) == [[], [[kind, False]]]


def test_ranks_that_find_an_anomaly_together(two_ranks):
    """They exchange evidence, also after one of them was alone at the same step."""
    together, without, alone = [True, True, True], [False, False, False], [True, False, True]
    assert two_ranks.run(find_together) == [
        [together, without, together, alone, together, together],
        [together, alone, together, without, together, together],
    ]


def test_an_overflow_that_one_rank_would_explain(two_ranks):
    """All ranks decide by the norms and the loss scale of the first rank."""
    assert two_ranks.run(explain_overflow) == [[True, 1], [True, 1]]


def test_a_learning_rate_that_jumps_on_one_rank(two_ranks, tmp_path):
    """Training goes on, and this rank records the jump."""
    two_ranks.run(raise_rate, str(tmp_path))

    assert records_of(tmp_path) == []
    first = records_of(tmp_path, rank=1)[0]
    assert (first["step"], first["kind"], first["ranks"]) == (13, "learning_rate_spike", [1])


def test_a_state_that_one_rank_has_loaded(two_ranks, tmp_path):
    """Training goes on, although gradients are a spike by this state."""
    two_ranks.run(load_alone, str(tmp_path))

    assert records_of(tmp_path / "loop") == []
    kinds = {record["kind"] for record in records_of(tmp_path / "loop", rank=1)}
    assert "spike" in kinds
