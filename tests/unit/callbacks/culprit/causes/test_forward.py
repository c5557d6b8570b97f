"""Attention logits and loads of experts are named as causes only where they explain the anomaly."""

import dataclasses

import pytest

from mfwrap.callbacks.culprit.causes.causes import cause_of
from mfwrap.callbacks.culprit.causes.evidence import Cause, CauseEvidence, StepTrace
from mfwrap.callbacks.culprit.causes.forward import risen
from mfwrap.callbacks.culprit.judges.forward import ForwardRise
from mfwrap.callbacks.culprit.judges.rates import RateRise
from mfwrap.callbacks.culprit.judges.step import StepScores
from mfwrap.callbacks.culprit.rank_evidence import RankEvidence

SCORES = StepScores(*[0.0] * len(StepScores._fields))._replace(update_ratio=1e-3)
GROWTH = ForwardRise("attention_logits", "h.1.attn", 12.0, 480.0, 32, is_alone=True)
JUMP = GROWTH._replace(num_steps=1)
LOAD = ForwardRise("expert_load", "h.1.moe", 1.02, 3.9, 1, is_alone=True)


def evidence(kind: str, *rises: ForwardRise, **last: float) -> CauseEvidence:
    """Return evidence with rises; `last` are scores of the step before."""
    trace = [StepTrace(step, applied=True, scores=SCORES) for step in range(1, 8)]
    trace[-2] = trace[-2]._replace(scores=SCORES._replace(**last))
    rank = RankEvidence(rank=0, loss=3.0, names=(), norms=(), usual_norms=(), forward=rises)
    return CauseEvidence(kind=kind, trace=trace, ranks=[rank], blamed=rank)


def found(kind: str, *rises: ForwardRise, **last: float) -> Cause | None:
    """Return what the rule finds."""
    return risen(evidence(kind, *rises, **last))


@pytest.mark.parametrize("kind", ["attention_logits", "loss_spike", "spike", "local_norm_spike"])
def test_logits_that_grow(kind: str) -> None:
    """Growth is the cause by itself, and of a finite spike; the module is named."""
    cause = cause_of(evidence(kind, GROWTH))
    assert (cause.name, cause.tensors) == ("attention_logits", ("h.1.attn",))
    assert "h.1.attn grew from 12 to 480 in 32 watched steps" in cause.explanation
    assert "QK-norm" in cause.suggestion


def test_logits_that_grow_in_all_layers() -> None:
    """No layer is at fault."""
    cause = found("attention_logits", GROWTH._replace(is_alone=False))
    assert cause is not None
    assert cause.tensors == ()


def test_logits_that_jump() -> None:
    """A jump is a cause by itself, if it is in one layer after ordinary updates."""
    cause = found("attention_logits", JUMP)
    assert cause is not None
    assert "rose from 12 to 480 at once" in cause.explanation
    assert found("attention_logits", JUMP._replace(is_alone=False)) is None
    assert found("attention_logits", JUMP, num_moved=1.0) is None
    assert found("attention_logits", JUMP, update=20.0) is None
    assert found("loss_spike", JUMP) is None


def test_logits_without_a_cause() -> None:
    """Logits that jump in several layers are no cause; the module with the largest is told."""
    jump = JUMP._replace(is_alone=False)
    cause = cause_of(evidence("attention_logits", LOAD, jump))
    assert cause.name == "unknown"
    assert cause.explanation == "the largest attention logit of h.1.attn rose from 12 to 480"
    assert cause_of(evidence("loss_spike", jump)).explanation == ""


def test_collapsed_router() -> None:
    """The router is the cause of an uneven load alone."""
    cause = found("expert_load", LOAD, GROWTH)
    assert cause is not None
    assert (cause.name, cause.tensors) == ("router", ("h.1.moe",))
    assert "load rose from 1.02 to 3.9" in cause.explanation
    assert "z-loss" in cause.suggestion
    assert found("expert_load", LOAD, num_moved=1.0) is None
    assert found("loss_spike", LOAD) is None


def test_other_causes() -> None:
    """A rate that jumped, and a non-finite number, have other causes; no rise is no cause."""
    jumped = evidence("attention_logits", GROWTH)
    last = jumped.trace[-2]
    trace = [*jumped.trace[:-2], last._replace(rate_rise=RateRise(0.001, 0.3, 1))]
    known = dataclasses.replace(jumped, trace=[*trace, jumped.trace[-1]])
    assert cause_of(known).name == "learning_rate"
    assert found("loss_not_finite", GROWTH) is None
    assert found("attention_logits") is None
