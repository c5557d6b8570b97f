"""Rules for the state of the optimizer, and for updates that it has made too large."""

import math
from collections.abc import Sequence

from mfwrap.callbacks.culprit.anomaly_log import NON_FINITE, UNKNOWN_CAUSE, StateNorm
from mfwrap.callbacks.culprit.causes.evidence import Cause, CauseEvidence, StepTrace
from mfwrap.callbacks.culprit.judges.step import LIMITS
from mfwrap.callbacks.culprit.rank_evidence import RankEvidence

_UPDATE_RISE = 5.0
"""Smallest ratio of the middle weight's update to those of the steps before that is unusual."""


def epsilon(evidence: CauseEvidence) -> Cause | None:
    """Find updates that Adam has divided by zero."""
    undivided = evidence.blamed.undivided
    # Most of the odd weights: what they have ruined may have moved others.
    if not undivided or len(undivided) < len(evidence.blamed.odd_weights) / 2:
        return None
    is_now = evidence.kind == "update_spike"
    which = "the update" if is_now else f"an update before step {evidence.now.step}"
    return Cause(
        "optimizer_epsilon",
        f"{which} divided by zero: {next(iter(undivided.values()))}",
        "keep weights and optimizer state in float32, or raise the optimizer's eps, and go back to "
        "a checkpoint from before that update",
        tensors=tuple(undivided),
    )


def ruined_state(evidence: CauseEvidence) -> Cause | None:
    """Find a non-finite state, unless its gradients may have ruined it."""
    # Of a weight that is non-finite itself, the state may be ruined by its gradients. But where
    # loss and gradients are finite, or have not reached the state, it has ruined the weight.
    is_first = evidence.is_finite or not evidence.now.applied
    risen = () if is_first else evidence.blamed.risen_weights
    weights = {one.name for one in risen}
    ruined = [
        one
        for one in _states(evidence.blamed)
        if not math.isfinite(one.norm) and one.name not in weights
    ]
    if not ruined:
        return None
    names = [one.name for one in ruined]
    return _state_changed(evidence, evidence.now, _change(ruined[0]), names)


def fallen_state(evidence: CauseEvidence) -> Cause | None:
    """Find second moments that have fallen."""
    if evidence.kind in NON_FINITE:
        return None
    fallen = [one for one in _states(evidence.blamed) if one.rise < 1]
    return _state_changed(evidence, evidence.now, _change(fallen[0])) if fallen else None


def odd_update(evidence: CauseEvidence) -> Cause | None:
    """Find an update that was too large, although gradients and rate were ordinary."""
    if evidence.kind in NON_FINITE:
        return None
    found = (_why_odd(evidence, each) for each in evidence.updates)
    return next(filter(None, found), None)


def _why_odd(evidence: CauseEvidence, each: StepTrace) -> Cause | None:
    scores, blamed = each.scores, evidence.blamed
    rise = evidence.rise_of_updates(each)
    moved = blamed.moved if each is evidence.now else ()
    # After a rise of the gradients, a large update is what the gradients ask for.
    if (
        (scores.num_moved < 1 and rise < _UPDATE_RISE)
        or scores.global_norm > LIMITS["global_norm"]
        or evidence.rise_of_norm(each) > rise / _UPDATE_RISE > 0
        or any(map(blamed.has_higher_gradient, moved))
    ):
        return None
    is_few = 0 < scores.num_moved < blamed.num_weights / 2
    number = f"{scores.num_moved:.0f} weight{'s' if scores.num_moved > 1 else ''}"
    size = f"too large for {number}" if scores.num_moved else f"{rise:.3g} times the usual one"
    ordinary = "gradients and learning rate were" if evidence.has_norms else "the rate was"
    what = f"the update of step {each.step} was {size}, although {ordinary} ordinary"
    # The state of other weights does not explain that these have moved, or risen.
    odd = moved or [one.name for one in blamed.weights]
    states = [one for one in _states(blamed) if not odd or one.name in odd]
    if states and not evidence.has_norms:
        return Cause(
            UNKNOWN_CAUSE,
            f"{what}: {_change(states[0])}: either the gradients, whose norm the loop does not "
            "give, or the state of the optimizer",
            "give the monitor the norm of the gradients, and look at what writes the optimizer's "
            "state",
        )
    if states:
        # A non-finite state cannot come from finite gradients; one that has risen, may.
        ruined = [one for one in states if not math.isfinite(one.norm)]
        names = [one.name for one in ruined or states]
        return _state_changed(evidence, each, f"{what}: {_change(states[0])}", names)
    if each is evidence.now and blamed.impossible:
        largest = max(blamed.impossible.values())
        why = f"{what}: {largest:.3g} times the rate, which no moments of Adam give"
        return _state_changed(evidence, each, why, list(blamed.impossible))
    if rise >= _UPDATE_RISE and (not is_few or blamed.names):
        # Nothing else is in the update of most weights.
        return _state_changed(evidence, each, what)
    return Cause(
        UNKNOWN_CAUSE,
        f"{what}{', and so is the state of the optimizer' if evidence.knows_optimizer else ''}",
        "look at what else changes updates: the step count, hooks, or a first gradient of rows "
        "that had none",
        is_provisional=True,
    )


def _states(blamed: RankEvidence) -> list[StateNorm]:
    """Return the optimizer states that are non-finite, have risen or have fallen.

    One that was zero had no gradient before.
    """
    others = {"weight", "buffer"}
    return [one for one in blamed.states if one.kind not in others and one.norm_before != 0]


def _change(state: StateNorm) -> str:
    return (
        f"the norm of {state.kind} of {state.name} went from {state.norm_before:.4g} to "
        f"{state.norm:.4g}"
    )


def _state_changed(
    evidence: CauseEvidence, step: StepTrace, what: str, names: Sequence[str] = ()
) -> Cause:
    """Return the cause; `names` are the weights whose state has changed before an update."""
    # The state of a few weights does not explain that most have moved.
    is_local = step.scores.num_moved < evidence.blamed.num_weights / 2
    return Cause(
        "optimizer_state",
        what,
        "go back to a checkpoint from before this step, and look at what writes the optimizer's "
        "state",
        tensors=tuple(names) if is_local else (),
    )
