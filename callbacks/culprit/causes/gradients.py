"""Rules for what the norms of the gradients show by themselves."""

from mfwrap.callbacks.culprit.causes.evidence import Cause, CauseEvidence, has_higher_loss
from mfwrap.callbacks.culprit.judges.step import LIMITS

_RISEN = LIMITS["local_norm"] / 2
"""Smallest score of a gradient that has clearly risen."""


def applied(evidence: CauseEvidence) -> Cause | None:
    """Find an update of non-finite gradients of which nothing else is known."""
    knows_more = evidence.origin or evidence.verdict or evidence.layer
    if evidence.kind != "gradient_not_finite" or knows_more or not evidence.now.applied:
        return None
    return Cause(
        "gradient",
        "the loss is finite, the global norm of the gradients is not, and the update was applied",
        "look at hooks and custom backwards, and go back to a checkpoint from before step "
        f"{evidence.now.step}",
    )


def dead(evidence: CauseEvidence) -> Cause | None:
    """Find gradients that are exactly zero, of some layers or of all."""
    has_vanished = evidence.kind == "vanishing_gradient" and evidence.global_norm == 0
    if evidence.kind != "zero_gradient" and not has_vanished:
        return None
    groups = evidence.blamed.dead
    whole = has_vanished or len(groups) == len(evidence.blamed.names)
    which = "all layers" if whole else evidence.layer or groups[0]
    return Cause(
        "dead_layer",
        f"the gradients of {which} are exactly zero",
        "look for a detached tensor, frozen inputs, or activations that are all cut off",
        is_in_layer=not whole,
    )


def of_one_layer(evidence: CauseEvidence) -> Cause | None:
    """Find gradients that have risen in one layer alone, while no loss has."""
    loss_has_risen = any(map(has_higher_loss, evidence.ranks))
    is_spike = evidence.kind in {"spike", "local_norm_spike"}
    if evidence.layer is None or loss_has_risen or not is_spike:
        return None
    blamed = evidence.blamed
    risen = [n for n, score in zip(blamed.names, blamed.scores, strict=False) if score > _RISEN]
    if len(risen) == 1:
        return Cause(
            "gradient",
            f"only the gradient of {risen[0]} has risen, the loss has not",
            "look at hooks on this weight, and at what writes its gradient",
            tensors=(risen[0],),
            where="gradient",
        )
    return Cause(
        "gradient",
        f"only the gradients of {evidence.layer} have risen, the loss has not",
        "look at hooks and custom backwards of this layer",
        is_in_layer=True,
    )
