"""Rules for what a replay has found: of the step, or of the step and the one before."""

import math

from mfwrap.callbacks.culprit.anomaly_log import UNKNOWN_CAUSE
from mfwrap.callbacks.culprit.causes.evidence import (
    SPOILT,
    Cause,
    CauseEvidence,
    counted,
    has_higher_loss,
    has_moved_far,
    outlier,
)
from mfwrap.callbacks.culprit.rank_evidence import RankEvidence
from mfwrap.callbacks.culprit.replay.replay import Origin
from mfwrap.callbacks.culprit.replay.verdict import TOO_LARGE

_NOT_AGAIN = (
    "look at code that depends on anything else, such as a counter; if there is none, suspect the "
    "hardware"
)
"""What to do about a fault that three exact replays do not have."""


_NOT_BY_UPDATE = (
    "look at the file that the weights were loaded from, or at the code that initializes them"
)
"""What to do about weights that were non-finite before the first update."""

_SHARE, _SAME = 0.4, 0.05
"""Smallest share of the rise that earlier data must have if the program has changed, and the
largest distance of outputs that are as before."""

_LARGE_LOSS = 1e6
"""Smallest loss that is no loss of an ordinary network."""

_FAR_ABOVE = 100.0
"""Ratio to the usual loss from which on a loss tells why its gradients are not finite."""

_FAR = 3.0
"""Smallest distance of an output that no few updates explain, whatever the loss is."""


def bad_input(evidence: CauseEvidence) -> Cause | None:
    """Find an input that is non-finite, or a micro-batch without targets or tokens."""
    origin = evidence.origin
    name = "" if origin is None else origin.name
    causes = {
        "input": Cause(
            "data", f"input `{name}` is non-finite", "remove or repair the sample in the data"
        ),
        "targets": Cause(
            "data",
            f"the micro-batch has no targets, all of `{name}` is ignored",
            "leave such samples out, or take a loss that is a sum over targets",
        ),
        "mask": Cause(
            "data",
            f"the micro-batch has no tokens, all of `{name}` is zero",
            "leave such samples out",
        ),
    }
    return None if origin is None else causes.get(origin.where)


def first_non_finite(evidence: CauseEvidence) -> Cause | None:
    """Find the cause of the first non-finite value in its place."""
    origin = evidence.origin
    if origin is None or (origin.where == "gradient" and _has_diverged(evidence)):
        return None
    name, has_update = origin.name, evidence.now.step > 1
    causes = {
        "weights": Cause(
            UNKNOWN_CAUSE,
            "most weights were non-finite before the step",
            "look at the update before, and at code that changes weights"
            if has_update
            else _NOT_BY_UPDATE,
        ),
        "weight": Cause(
            "weight_changed",
            f"{name} has non-finite elements"
            + ("" if has_update else ", and had them before the first update"),
            f"go back to a checkpoint in which it is finite; if there is none, {_NOT_BY_UPDATE}"
            if has_update
            else _NOT_BY_UPDATE,
            is_in_layer=True,
        ),
        "other_weight": Cause(
            "loss",
            f"{name}, of a model beside the network, is non-finite",
            "look at the file that this model was loaded from, or at code that changes its weights",
        ),
        "loss": Cause(
            "loss",
            "the outputs of all modules of the network are finite, the loss is not",
            "look at the computation of the loss: a logarithm of zero, a division by a count, "
            "outputs whose square overflows, or another model that it calls",
        ),
        "activation": Cause(
            "activation",
            f"{name} made a non-finite output from finite inputs and weights"
            if not origin.beside
            else f"the forward of {name or 'the network'} made a non-finite value from finite "
            f"inputs and weights, and gave it to {origin.beside}",
            "look at the operations in this module, and at its dtype",
            is_in_layer=True,
        ),
        "gradient": _non_finite_gradient(origin, evidence.blamed),
    }
    return causes.get(origin.where)


def _has_diverged(evidence: CauseEvidence) -> bool:
    """Tell whether the steps before have made the loss so large that its gradients overflow."""
    return not evidence.is_first and abs(evidence.blamed.loss) > _LARGE_LOSS


def _begins_inside(evidence: CauseEvidence) -> bool:
    """Tell whether the gradients of layers that the backward meets first are finite."""
    blamed = evidence.blamed
    if evidence.layer is None or not blamed.bad_groups:
        return False
    first = range(blamed.bad_groups[-1] + 1, len(blamed.norms))
    # A group that never has a gradient tells nothing of what has passed it.
    return any(0 < max(blamed.norms[n], blamed.usual_norms[n]) < math.inf for n in first)


def _non_finite_gradient(origin: Origin, blamed: RankEvidence) -> Cause:
    bad = [blamed.names[number] for number in blamed.bad_groups]
    if origin.name in bad and len(bad) > 1:
        # The gradient of a weight goes nowhere: those of the others have become so by themselves.
        names = (origin.name, *(name for name in bad if name != origin.name))
        return Cause(
            "gradient",
            f"the gradients of {counted(names, 'weights')} became non-finite, that of "
            f"{origin.name} from finite values",
            "look at hooks on weights, and at what changes gradients between backward and update",
            tensors=names,
            where="gradient",
        )
    return Cause(
        "gradient",
        _of_gradient(origin),
        "look at hooks and custom backwards, and for a square root or a norm at zero",
        is_in_layer=True,
    )


def _of_gradient(origin: Origin) -> str:
    if origin.by_hook:
        return f"a hook on the output of {origin.name} made its gradient non-finite"
    made = "made a non-finite gradient from finite values"
    if not origin.beside:
        return f"the backward of {origin.name or 'the network'} {made}"
    where = f"the forward of {origin.name}" if origin.name else "the network's own forward"
    return f"the backward of the code in {where} behind {origin.beside} {made}"


def verdict(evidence: CauseEvidence) -> Cause | None:
    """Find what a replay that was finite leaves as the cause."""
    found = evidence.verdict
    if _has_diverged(evidence):
        return None
    if found is not None and found.result == "not_covered" and not _begins_inside(evidence):
        blamed = evidence.blamed
        places = (outlier(blamed.factors), outlier(blamed.outer_losses))
        is_large = _FAR_ABOVE * abs(blamed.usual_loss) < abs(blamed.loss) < math.inf
        rose = f"the loss is {blamed.loss:.4g} (usually {blamed.usual_loss:.4g}), and "
        return Cause(
            "loss",
            f"{rose if is_large else ''}the fault is outside of the network: {found.detail}",
            "look at the code between the network's output and the backward",
            micro_batch=next((each for each in places if each is not None), None),
        )
    if found is not None and found.detail == TOO_LARGE:
        loss = evidence.blamed.loss
        if loss > _LARGE_LOSS:
            return Cause("loss", f"the loss is {loss:.4g}", "look for a factor in the loss")
        return Cause(
            "gradient",
            "a backward made gradients that are finite and far too large",
            "look at hooks and custom backwards",
        )
    is_transient = found is not None and found.detail == "transient"
    again = "the same inputs, weights and random numbers gave finite values three times"
    if evidence.kind == "gradient_not_finite" and evidence.layer is not None:
        return Cause(
            "gradient",
            f"the loss is finite, and gradients are not from {evidence.layer} on, in the order of "
            f"the backward{f'; {again}' if is_transient else ''}",
            "look at hooks and custom backwards of this layer"
            + (f"; or {_NOT_AGAIN}" if is_transient else ""),
            is_in_layer=True,
        )
    return Cause("transient", again, _NOT_AGAIN) if is_transient else None


def difference(evidence: CauseEvidence) -> Cause | None:
    """Find the cause of the first difference from the step before in its place."""
    found = evidence.blamed.difference
    if found is None:
        return None
    if found.by_hook:
        names = (found.name, *found.others)
        return Cause(
            "gradient",
            f"a hook has changed the gradient of {counted(names, 'weights')} by {found.ratio:.3g} "
            "times its size, and has not done so in the step before",
            "look at hooks on weights and on outputs of modules",
            tensors=names,
            where="gradient",
        )
    if found.where == "gradient" and has_higher_loss(evidence.blamed):
        return None  # gradients rise with the loss, and by no backward of their own
    times = f"{found.ratio:.3g} times as large as on the data of the step before"
    if found.ratio == 0:
        times = "zero, which it is not on the data of the step before"
    if found.where == "input":
        return Cause("data", f"input `{found.name}` is {times}", "look at the samples of this step")
    if found.where == "activation":
        return Cause(
            "activation",
            f"the output of {found.name} is {times}, and what it has received is ordinary",
            "look at the operations of this module, at its hooks and at its inputs",
            tensors=(found.name,),
            where="activation",
        )
    return Cause(
        "gradient",
        f"in the order of the backward, a gradient of {found.name} is the first that is {times}",
        "look at hooks and custom backwards there, and for a division by a value near zero",
        tensors=(found.name,),
        where="gradient",
    )


def program(evidence: CauseEvidence) -> Cause | None:
    """Find that the program gives something else for the data of an earlier step."""
    found, blamed = evidence.blamed.program, evidence.blamed
    # The call is run with the weights that the step has left.
    has_moved = has_moved_far([evidence.now, *evidence.before]) or blamed.odd_weights
    if found is None or not found.then > 0 or has_moved:
        return None
    since = evidence.now.step - found.num_steps
    travel = [each.scores.update_ratio for each in evidence.trace if each.step >= since]
    if math.fsum(one for one in travel if one > 0) > SPOILT:
        return None  # any output is another one after such updates
    usual, now = blamed.usual_loss, blamed.loss
    if evidence.shift is not None and evidence.shift.of == "loss":
        usual, now = evidence.shift.before, evidence.shift.now
    # As ratios: the loop may divide the losses of the micro-batches by another number.
    rise, again = now / usual - 1 if usual > 0 else 0.0, found.again / found.then - 1
    is_worse = has_higher_loss(blamed) or evidence.shift is not None
    is_far = found.name is not None and found.distance > _FAR
    if not is_far and not (is_worse and rise > 0 and again >= _SHARE * rise):
        return None
    which = f"run again, the data of {found.num_steps} steps before"
    loss = f"{found.again / found.then:.3g} times the loss that they had"
    if found.name is None:
        if not found.distance < _SAME:
            return None
        return Cause(
            "loss",
            f"{which} have {loss}, and the outputs that they had",
            "look for what computes the loss from the outputs",
        )
    return Cause(
        "activation",
        f"{which} have {loss}, and another output of {found.name}, {found.distance:.3g} times its "
        "size away, which has received what it did then",
        "look at the operations of this module, and at its hooks, masks and other arguments",
        tensors=(found.name,),
        where="activation",
    )
