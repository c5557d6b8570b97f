"""What the rules of causes read from the evidence."""

import pytest

from mfwrap.callbacks.culprit.anomaly_log import StateNorm
from mfwrap.callbacks.culprit.causes.evidence import CauseEvidence, StepTrace
from mfwrap.callbacks.culprit.judges.step import StepScores
from mfwrap.callbacks.culprit.rank_evidence import RankEvidence

SCORES = StepScores(*[0.0] * len(StepScores._fields))


def test_the_steps_before_are_those_whose_update_was_applied():
    """The last three of them, the last one first."""
    trace = [StepTrace(step, step != 4, SCORES) for step in range(1, 7)]
    rank = RankEvidence(rank=0, loss=1.0, names=(), norms=(), usual_norms=())
    evidence = CauseEvidence(kind="spike", trace=trace, ranks=[rank], blamed=rank)

    assert evidence.now.step == 6
    assert [each.step for each in evidence.before] == [5, 3, 2]
    sampled = CauseEvidence(kind="state_spike", trace=trace, ranks=[rank], blamed=rank)
    assert [each.step for each in sampled.before] == [5, 3, 2, 1]


def test_the_rise_of_updates_is_at_the_same_rate():
    """It is the ratio to the largest of at least three updates before."""
    updates = [(0.01, 1.0), (0.03, 2.0), (0.02, 2.0), (0.9, 3.0)]
    trace = [
        StepTrace(n, n >= 0, SCORES._replace(update_ratio=ratio, learning_rate=rate))
        for n, (ratio, rate) in enumerate(updates)
    ]
    rank = RankEvidence(rank=0, loss=1.0, names=(), norms=(), usual_norms=())
    evidence = CauseEvidence(kind="spike", trace=trace, ranks=[rank], blamed=rank)

    assert evidence.rise_of_updates(trace[3]) == pytest.approx(20.0)
    assert evidence.rise_of_updates(trace[2]) == 0.0


def test_buffers_that_have_risen_or_become_non_finite():
    """Each is named once."""
    norms = {"norm": 9.0, "norm_before": 1.0, "rise": 9.0}
    states = tuple(StateNorm(kind=k, name=k, **norms) for k in ("buffer", "weight"))
    rank = RankEvidence(
        rank=0, loss=1.0, names=(), norms=(), usual_norms=(), states=states, buffers=("a", "buffer")
    )
    trace = [StepTrace(step=1, applied=True, scores=SCORES)]
    evidence = CauseEvidence(kind="spike", trace=trace, ranks=[rank], blamed=rank)

    assert evidence.buffers == ["a", "buffer"]
