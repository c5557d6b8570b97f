"""Choose the cause of an anomaly from its evidence, by written rules."""

from collections.abc import Callable
from typing import Literal, NamedTuple

from mfwrap.callbacks.culprit.anomaly_log import UNKNOWN_CAUSE
from mfwrap.callbacks.culprit.causes import (
    buffers,
    data,
    forward,
    gradients,
    loss,
    optimizer,
    rate,
    replay,
    settings,
    weights,
)
from mfwrap.callbacks.culprit.causes.evidence import Cause, CauseEvidence


class _Rule(NamedTuple):
    """Rule that may find the cause; its module says what it looks at."""

    find: Callable[[CauseEvidence], Cause | None]
    """Returns ``None`` if its evidence is not there."""

    basis: Literal["certain", "measured", "inferred"]
    """``"certain"`` if what the rule finds cannot be a consequence of ruined weights, and
    ``"inferred"`` if it compares the step with the steps before, which must have been good."""


_RULES = (
    _Rule(rate.jump, "certain"),
    _Rule(optimizer.epsilon, "measured"),
    _Rule(weights.changed_outside, "certain"),
    _Rule(rate.large_from_the_start, "measured"),
    _Rule(settings.changed, "certain"),
    _Rule(forward.risen, "measured"),
    _Rule(optimizer.ruined_state, "measured"),
    _Rule(weights.ruined, "measured"),
    _Rule(optimizer.fallen_state, "inferred"),
    _Rule(optimizer.odd_update, "inferred"),
    _Rule(weights.grown, "inferred"),
    _Rule(loss.scaled_outside, "measured"),
    _Rule(loss.risen_outside, "measured"),
    _Rule(loss.vanished, "inferred"),
    _Rule(gradients.applied, "measured"),
    _Rule(buffers.changed, "inferred"),
    _Rule(replay.bad_input, "certain"),
    _Rule(replay.first_non_finite, "measured"),
    _Rule(replay.verdict, "measured"),
    _Rule(loss.ruined_outside, "measured"),
    _Rule(loss.scaled, "inferred"),
    _Rule(rate.raised, "measured"),
    _Rule(gradients.dead, "measured"),
    _Rule(replay.difference, "inferred"),
    _Rule(replay.program, "measured"),
    _Rule(data.shifted, "measured"),
    _Rule(loss.dropped, "inferred"),
    _Rule(gradients.of_one_layer, "inferred"),
    _Rule(data.changed_program, "inferred"),
    _Rule(loss.common_term, "inferred"),
    _Rule(data.bad, "inferred"),
    _Rule(rate.growing_updates, "measured"),
    _Rule(rate.large_updates, "measured"),
    _Rule(data.far_rows, "inferred"),
    _Rule(rate.large_all_along, "measured"),
)
"""All rules, in the order in which they are asked.

Causes that explain more come first: a rate that was too high also moves the weights, and a weight
that has changed also raises the loss.
"""


def cause_of(evidence: CauseEvidence) -> Cause:
    """Return the cause that the first matching rule finds; ``unknown`` if none does.

    A later step of an episode is explained only by what was measured, or by a sample of the state:
    anything else may be a consequence. So it is at a learning rate that was a cause before. After a
    divergence, anything may be one that is not certain. A provisional cause yields to that of a
    later rule.
    """
    asked = {"certain", "measured"}
    if evidence.is_first or evidence.kind == "state_spike":
        asked.add("inferred")
    finding = evidence.run_away or str(evidence.shift or forward.finding(evidence))
    known = Cause(UNKNOWN_CAUSE, finding, "")
    if evidence.rate_step is not None:
        asked.discard("inferred")
        known = _still_at_rate(finding, evidence)
    if evidence.diverged_step is not None:
        asked = {"certain"}
        known = _consequence(finding, evidence.diverged_step)
    for rule in _RULES:
        cause = rule.find(evidence) if rule.basis in asked else None
        if cause is not None and not cause.is_provisional:
            return loss.naming_terms(cause, evidence)
        known = cause or known
    return loss.naming_terms(known, evidence)


def _still_at_rate(finding: str, evidence: CauseEvidence) -> Cause:
    still = f"the learning rate is about as high as in step {evidence.rate_step}, where it was the "
    still += "cause"
    return Cause("learning_rate", f"{finding}; {still}" if finding else still, rate.LOWER_RATE)


def _consequence(finding: str, step: int) -> Cause:
    follows = f"it follows the divergence of step {step}"
    return Cause(
        "diverged",
        f"{finding}; {follows}" if finding else follows,
        f"look at step {step} first: weights that are ruined make anything else go wrong",
    )
