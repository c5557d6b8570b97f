"""Rule for causes that show in attention logits and in the load of experts."""

from mfwrap.callbacks.culprit.anomaly_log import NON_FINITE
from mfwrap.callbacks.culprit.causes.evidence import Cause, CauseEvidence, has_moved_far
from mfwrap.callbacks.culprit.judges.forward import LOAD, LOGITS, ForwardRise

_LARGEST = "the largest attention logit"


def risen(evidence: CauseEvidence) -> Cause | None:
    """Return the cause of an anomaly that watched attention logits, or loads of experts, explain.

    Attention logits that have grown over several steps also explain a later rise of the loss. A
    sudden rise is the cause of nothing else, and needs ordinary updates before it.
    """
    if evidence.kind in NON_FINITE:
        return None
    rises = evidence.blamed.forward
    grown = [each for each in rises if each.kind == LOGITS and each.num_steps > 1]
    if grown and evidence.kind != LOAD:
        steps = f"in {grown[0].num_steps} watched steps"
        return _logits(grown[0], f"grew {_change(grown[0])} {steps}")
    first = next((each for each in rises if each.kind == evidence.kind), None)
    if first is None or has_moved_far(evidence.before):
        return None
    if first.kind == LOAD:
        return _router(first)
    return _logits(first, f"rose {_change(first)} at once") if first.is_alone else None


def finding(evidence: CauseEvidence) -> str:
    """Say which attention logit has risen, if that is the anomaly and its cause is unknown."""
    rises = evidence.blamed.forward if evidence.kind == LOGITS else ()
    first = next((each for each in rises if each.kind == LOGITS), None)
    return "" if first is None else f"{_LARGEST} of {first.module} rose {_change(first)}"


def _logits(worst: ForwardRise, what: str) -> Cause:
    return Cause(
        "attention_logits",
        f"{_LARGEST} of {worst.module} {what}",
        "normalize queries and keys (QK-norm), lower the learning rate, or clip the logits",
        tensors=(worst.module,) if worst.is_alone else (),
    )


def _router(worst: ForwardRise) -> Cause:
    return Cause(
        "router",
        f"the router of {worst.module} sends its tokens to fewer experts: the concentration of "
        f"their load rose {_change(worst)}, where 1 is balanced",
        "add a load-balancing loss, a router z-loss or jitter, and look at the router's weights",
        tensors=(worst.module,) if worst.is_alone else (),
    )


def _change(rise: ForwardRise) -> str:
    return f"from {rise.before:.3g} to {rise.now:.3g}"
