"""Rules for weights that have changed in another way than by an ordinary update."""

import math
from collections.abc import Sequence

from mfwrap.callbacks.culprit.anomaly_log import StateNorm
from mfwrap.callbacks.culprit.causes.evidence import (
    Cause,
    CauseEvidence,
    counted,
    has_moved_far,
)
from mfwrap.callbacks.culprit.judges.step import LIMITS

_MOMENTUM = 10.0
"""Largest ratio of an update to the rate times the gradient, for a momentum of 0.9."""

_NO_UPDATE = "if no code of yours changes weights, suspect the memory"
"""What to do about a change that no update has made."""


def changed_outside(evidence: CauseEvidence) -> Cause | None:
    """Find weights that have changed between two updates."""
    blamed, now = evidence.blamed, evidence.now
    step, names = now.step, blamed.changed if now.scores.num_changed > 0 else ()
    if not names and blamed.changed_before is not None:
        step, names = blamed.changed_before
    if not names:
        return None
    what = f"{counted(names, 'weights')} changed between the updates of steps {step - 1} and {step}"
    return _changed(step, what, names, _NO_UPDATE)


def ruined(evidence: CauseEvidence) -> Cause | None:
    """Find weights that have become non-finite together, while all updates were finite."""
    blamed = evidence.blamed
    # Updates are added up from one sample to the next, which is the one that finds this.
    if evidence.kind != "state_spike" or not evidence.is_first:
        return None
    names = [one.name for one in blamed.risen_weights if not math.isfinite(one.norm)]
    if not blamed.has_moved or not names or set(names) & set(blamed.driven):
        return None
    what = f"{counted(names, 'weights')} became non-finite, and the updates were finite"
    return _changed(evidence.first_bad_step, what, names, _NO_UPDATE)


def grown(evidence: CauseEvidence) -> Cause | None:
    """Find a weight whose norm has risen by more than its updates explain."""
    # Weights that grow by their updates are a consequence: of the rate, of the optimizer's state.
    blamed = evidence.blamed
    risen = [
        one
        for one in blamed.weights
        if one.name not in blamed.driven and not _is_asked_for(evidence, one)
    ]
    if not risen:
        return None
    changed = [one for one in risen if one.name in blamed.changed]
    # The less is known about a step, the less may be said about its update.
    limit = LIMITS["update"] / (2 if evidence.kind == "state_spike" else 1)
    if not changed and has_moved_far(evidence.updates, limit):
        return None
    worst = (changed or risen)[0]
    what = (
        f"the norm of {worst.name} went from {worst.norm_before:.4g} to {worst.norm:.4g}, more "
        "than the updates of its sampled elements explain"
    )
    if not math.isfinite(worst.norm):
        what = f"{worst.name} became non-finite, and no update of its sampled elements did it"
    return _changed(evidence.first_bad_step, what, [worst.name], "look at what writes this weight")


def _is_asked_for(evidence: CauseEvidence, weight: StateNorm) -> bool:
    """Tell whether the gradients explain that a weight has grown, by an optimizer such as SGD."""
    if not evidence.blamed.follows_gradients:
        return False
    steps = [evidence.now, *evidence.before]
    sizes = [each.scores.learning_rate * (each.global_norm or 0.0) for each in steps]
    return weight.norm - weight.norm_before <= _MOMENTUM * sum(sizes)


def _changed(step: int, what: str, names: Sequence[str], advice: str) -> Cause:
    """Return the cause; `step` is the first step that may have the fault."""
    return Cause(
        "weight_changed",
        what,
        f"go back to a checkpoint from before step {step}; {advice}",
        tensors=tuple(names),
        where="weight",
    )
