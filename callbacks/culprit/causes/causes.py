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

    basis: Literal["measured", "inferred"]
    """``"inferred"`` if the rule compares the step with the steps before, which must have been
    good."""


_RULES = (
    _Rule(rate.jump, "measured"),
    _Rule(optimizer.epsilon, "measured"),
    _Rule(weights.changed_outside, "measured"),
    _Rule(rate.large_from_the_start, "measured"),
    _Rule(settings.changed, "measured"),
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
    _Rule(rate.large_all_along, "measured"),
)
"""All rules, in the order in which they are asked.

Causes that explain more come first: a rate that was too high also moves the weights, and a weight
that has changed also raises the loss.
"""


def cause_of(evidence: CauseEvidence) -> Cause:
    """Return the cause that the first matching rule finds; ``unknown`` if none does.

    A later step of an episode is explained only by what was measured, or by a sample of the state:
    anything else may be a consequence. A provisional cause yields to that of a later rule.
    """
    asks_all = evidence.is_first or evidence.kind == "state_spike"
    finding = evidence.run_away or str(evidence.shift or forward.finding(evidence))
    known = Cause(UNKNOWN_CAUSE, finding, "")
    for rule in _RULES:
        cause = rule.find(evidence) if asks_all or rule.basis == "measured" else None
        if cause is not None and not cause.is_provisional:
            return cause
        known = cause or known
    return known
