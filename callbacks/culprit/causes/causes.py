"""Choose the cause of an anomaly from its evidence, by written rules."""

import math
from collections.abc import Callable, Sequence

from mfwrap.callbacks.culprit.anomaly_log import NON_FINITE, UNKNOWN_CAUSE, StateNorm
from mfwrap.callbacks.culprit.causes.data import bad_data
from mfwrap.callbacks.culprit.causes.evidence import (
    Cause,
    CauseEvidence,
    StepTrace,
    has_higher_loss,
    has_moved_far,
    outlier,
)
from mfwrap.callbacks.culprit.causes.forward import forward_cause, forward_finding
from mfwrap.callbacks.culprit.causes.loss import (
    dropped,
    scaled_loss,
    scaled_outside,
    vanished,
)
from mfwrap.callbacks.culprit.causes.rate import (
    growing_updates,
    large_from_the_start,
    large_updates,
    raised_rate,
    rate_jump,
)
from mfwrap.callbacks.culprit.judges.settings import listed
from mfwrap.callbacks.culprit.judges.step import LIMITS
from mfwrap.callbacks.culprit.rank_evidence import RankEvidence
from mfwrap.callbacks.culprit.replay.replay import Origin

_UPDATE_RISE = 5.0
"""Smallest ratio of the middle weight's update to those of the steps before that is unusual."""


_NOT_AGAIN = (
    "look at code that depends on anything else, such as a counter; if there is none, suspect the "
    "hardware"
)
"""What to do about a fault that three exact replays do not have."""

_VARIANCE = 3.0
"""Largest ratio of the rise of a variance to the square of that of the mean, if both are of inputs
that have grown."""


def cause_of(evidence: CauseEvidence) -> Cause:
    """Return the cause that the first matching rule finds; ``unknown`` if none does.

    Causes that explain more come first: a rate that was too high also moves the weights, and a
    weight that has changed also raises the loss. A later step of an episode is explained only by
    what was measured, or by a sample of the state: anything else may be a consequence.
    """
    asks_all = evidence.is_first or evidence.kind == "state_spike"
    found = (rule(evidence) for rule in _RULES if asks_all or rule not in _INFERRED)
    finding = forward_finding(evidence) if evidence.shift is None else str(evidence.shift)
    known = Cause(UNKNOWN_CAUSE, finding, "")
    for cause in found:
        if cause is not None and not cause.is_provisional:
            return cause
        known = known if cause is None else cause
    return known


def _epsilon(evidence: CauseEvidence) -> Cause | None:
    undivided = evidence.blamed.undivided
    # Most of the odd weights: what they have ruined may have moved others.
    if not undivided or len(undivided) < len(evidence.blamed.odd_weights) / 2:
        return None
    why = next(iter(undivided.values()))
    is_now = evidence.kind == "update_spike"
    return Cause(
        "optimizer_epsilon",
        f"the update divided by zero: {why}"
        if is_now
        else f"an update before step {evidence.now.step} divided by zero: {why}",
        "keep weights and optimizer state in float32, or raise the optimizer's eps, and go back to "
        "a checkpoint from before that update",
        tensors=tuple(undivided),
    )


def _changed_outside(evidence: CauseEvidence) -> Cause | None:
    blamed, now = evidence.blamed, evidence.now
    step, names = now.step, blamed.changed if now.scores.num_changed > 0 else ()
    if not names and blamed.changed_before is not None:
        step, names = blamed.changed_before
    if not names:
        return None
    what = (
        f"{_counted(names, 'weights')} changed between the updates of steps {step - 1} and {step}"
    )
    return _weight_changed(step, what, names, by_an_update=False)


def _ruined_weights(evidence: CauseEvidence) -> Cause | None:
    """Find weights that have become non-finite together, while all updates were finite."""
    blamed = evidence.blamed
    # Updates are added up from one sample to the next, which is the one that finds this.
    if evidence.kind != "state_spike" or not evidence.is_first:
        return None
    ruined = [one.name for one in blamed.risen_weights if not math.isfinite(one.norm)]
    if not blamed.has_moved or not ruined or set(ruined) & set(blamed.driven):
        return None
    what = f"{_counted(ruined, 'weights')} became non-finite, and the updates were finite"
    return _weight_changed(evidence.first_bad_step, what, ruined, by_an_update=False)


def _grown_weight(evidence: CauseEvidence) -> Cause | None:
    # Weights that grow by their updates are a consequence: of the rate, of the optimizer's state.
    blamed = evidence.blamed
    weights = [one for one in blamed.weights if one.name not in set(blamed.driven)]
    if not weights or blamed.has_moved:
        return None
    changed = [one for one in weights if one.name in blamed.changed]
    # The less is known about a step, the less may be said about its update.
    limit = LIMITS["update"] / (2 if evidence.kind == "state_spike" else 1)
    if not changed and has_moved_far(evidence.updates, limit):
        return None
    weights = changed or weights
    what = f"{_change(weights[0])}, more than the updates of its sampled elements explain"
    if not math.isfinite(weights[0].norm):
        what = f"{weights[0].name} became non-finite, and no update of its sampled elements did it"
    return _weight_changed(evidence.first_bad_step, what, [weights[0].name])


def _weight_changed(
    step: int, what: str, names: Sequence[str], *, by_an_update: bool = True
) -> Cause:
    """Return the cause of a weight that has changed.

    Args:
        step: First step that may have the fault.
        what: What has happened.
        names: Names of the weights.
        by_an_update: Whether an update may have done it. Otherwise code of the loop has, or the
            memory is at fault.
    """
    where = "look at what writes this weight"
    return Cause(
        "weight_changed",
        what,
        f"go back to a checkpoint from before step {step}; "
        + (where if by_an_update else "if no code of yours changes weights, suspect the memory"),
        tensors=tuple(names),
        where="weight",
    )


def _ruined_state(evidence: CauseEvidence) -> Cause | None:
    # Of a weight that is non-finite itself, the state may be ruined by its gradients. But where
    # loss and gradients are finite, the state has ruined the weight.
    weights = {one.name for one in evidence.blamed.states if one.kind == "weight"}
    if evidence.is_finite:
        weights = set()
    ruined = [
        one
        for one in _states(evidence.blamed)
        if not math.isfinite(one.norm) and one.name not in weights
    ]
    if not ruined:
        return None
    # A few states do not explain that most weights have moved.
    is_local = evidence.now.scores.num_moved < evidence.blamed.num_weights / 2
    names = [one.name for one in ruined] if is_local else []
    return _of_optimizer(_change(ruined[0]), names)


def _states(blamed: RankEvidence) -> list[StateNorm]:
    """Return the optimizer states that are non-finite, have risen or have fallen.

    One that was zero had no gradient before.
    """
    others = {"weight", "buffer"}
    return [one for one in blamed.states if one.kind not in others and one.norm_before != 0]


def _fallen_state(evidence: CauseEvidence) -> Cause | None:
    fallen = [one for one in _states(evidence.blamed) if one.rise < 1]
    return _of_optimizer(_change(fallen[0]), []) if fallen else None


def _optimizer_state(evidence: CauseEvidence) -> Cause | None:
    if evidence.kind in NON_FINITE:
        return None
    found = (_odd_update(evidence, each) for each in evidence.updates)
    return next(filter(None, found), None)


def _odd_update(evidence: CauseEvidence, each: StepTrace) -> Cause | None:
    """Find why an update was too large, although gradients and rate were ordinary."""
    scores, blamed = each.scores, evidence.blamed
    rise = evidence.rise_of_updates(each)
    moved = blamed.moved if each is evidence.now else ()
    # After a spike of the gradients, a large update is what the gradients ask for.
    if (
        (scores.num_moved < 1 and rise < _UPDATE_RISE)
        or scores.global_norm > LIMITS["global_norm"]
        or any(map(blamed.has_higher_gradient, moved))
    ):
        return None
    number = f"{scores.num_moved:.0f} weight{'s' if scores.num_moved > 1 else ''}"
    size = f"too large for {number}" if scores.num_moved else f"{rise:.3g} times the usual one"
    ordinary = "gradients and learning rate were" if evidence.has_norms else "the rate was"
    what = f"the update of step {each.step} was {size}, although {ordinary} ordinary"
    # The state of other weights does not explain that these have moved, or risen.
    odd = moved or [one.name for one in blamed.weights]
    states = [one for one in _states(blamed) if not odd or one.name in odd]
    # A few states that have risen do not explain that most weights have moved.
    is_local = scores.num_moved < blamed.num_weights / 2
    if states and not evidence.has_norms:
        return _of_either(f"{what}: {_change(states[0])}")
    if states:
        # A non-finite state cannot come from finite gradients; one that has risen, may.
        ruined = [one for one in states if not math.isfinite(one.norm)]
        names = [one.name for one in ruined or states]
        return _of_optimizer(f"{what}: {_change(states[0])}", names if is_local else ())
    if each is evidence.now and blamed.impossible:
        names, largest = list(blamed.impossible), max(blamed.impossible.values())
        why = f"{what}: {largest:.3g} times the rate, which no moments of Adam give"
        return _of_optimizer(why, names if is_local else ())
    if rise >= _UPDATE_RISE:
        # Nothing else is in the update of most weights.
        return _of_optimizer(what, ())
    return Cause(
        UNKNOWN_CAUSE,
        f"{what}{', and so is the state of the optimizer' if evidence.knows_optimizer else ''}",
        "look at what else changes updates: the step count, hooks, or a first gradient of rows "
        "that had none",
        is_provisional=True,
    )


def _of_either(what: str) -> Cause:
    return Cause(
        UNKNOWN_CAUSE,
        f"{what}: either the gradients, whose norm the loop does not give, or the state of the "
        "optimizer",
        "give the monitor the norm of the gradients, and look at what writes the optimizer's state",
    )


def _of_optimizer(what: str, names: Sequence[str]) -> Cause:
    return Cause(
        "optimizer_state",
        what,
        "go back to a checkpoint from before this step, and look at what writes the optimizer's "
        "state",
        tensors=tuple(names),
    )


def _buffers(evidence: CauseEvidence) -> Cause | None:
    names = evidence.buffers
    if not names or (evidence.origin is not None and evidence.origin.where != "input"):
        return None
    if not any(name.rpartition(".")[2].startswith("running_") for name in names):
        return Cause(
            "buffer_changed",
            f"the buffer {names[0]} has changed",
            "look at the code that writes this buffer",
            tensors=tuple(names),
        )
    if evidence.blamed.weights and not evidence.blamed.buffers:
        return None  # another weight gives other statistics
    if evidence.kind in _OF_STEP and not evidence.blamed.buffers:
        return Cause(
            "data",
            f"the batch is far from those before: it changed the running statistics in {names[0]}",
            f"look at the samples of step {evidence.now.step}, and go back to a checkpoint from "
            "before it",
        )
    grown = _grown_inputs(evidence)
    if grown is not None:
        return grown
    return Cause(
        "batch_norm",
        f"{_by_input(evidence.origin)}the running statistics in {_counted(names, 'buffers')}",
        f"{'remove the sample, and ' if evidence.origin is not None else ''}go back to a "
        f"checkpoint from before step {evidence.first_bad_step}: skipping the update does not "
        "repair the statistics",
        tensors=() if evidence.origin is not None else tuple(names),
    )


def _grown_inputs(evidence: CauseEvidence) -> Cause | None:
    """Find running statistics that have grown as those of larger inputs do: means and variances."""
    risen = [one for one in evidence.blamed.states if one.kind == "buffer" and one.norm_before > 0]
    rises = {one.name: one.rise for one in risen if math.isfinite(one.norm)}
    for name, variance in rises.items():
        module, _, last = name.rpartition(".")
        mean = rises.get(f"{module}.running_mean", 0.0)
        if last == "running_var" and mean**2 / _VARIANCE < variance < mean**2 * _VARIANCE:
            return Cause(
                "activation",
                f"what {module} receives is about {math.sqrt(variance):.3g} times as large as "
                "before: mean and variance have grown alike",
                "look at the layers before it",
                tensors=(module,),
            )
    return None


def _non_finite(evidence: CauseEvidence) -> Cause | None:
    origin = evidence.origin
    if origin is None:
        return None
    name = origin.name
    causes = {
        "input": Cause(
            "data", f"input `{name}` is non-finite", "remove or repair the sample in the data"
        ),
        "targets": Cause(
            "data",
            f"a micro-batch has no targets, all of `{name}` is ignored",
            "leave such samples out, or take a loss that is a sum over targets",
        ),
        "weights": Cause(
            UNKNOWN_CAUSE,
            "an earlier update made most weights non-finite",
            "look at the steps before",
        ),
        "weight": Cause(
            "weight_changed",
            f"{name} has non-finite elements",
            "go back to an earlier checkpoint",
            is_in_layer=True,
        ),
        "loss": Cause(
            "loss",
            "the outputs of all modules are finite, the loss is not",
            "look at the computation of the loss: a logarithm of zero, or a division by a count",
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


def _non_finite_gradient(origin: Origin, blamed: RankEvidence) -> Cause:
    bad = [blamed.names[number] for number in blamed.bad_groups]
    if origin.name in bad and len(bad) > 1:
        # The gradient of a weight goes nowhere: those of the others have become so by themselves.
        names = (origin.name, *(name for name in bad if name != origin.name))
        return Cause(
            "gradient",
            f"the gradients of {_counted(names, 'weights')} became non-finite, that of "
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
        return f"the backward of {origin.name} {made}"
    where = f"the forward of {origin.name}" if origin.name else "the network's own forward"
    return f"the backward of the code in {where} behind {origin.beside} {made}"


def _applied_gradients(evidence: CauseEvidence) -> Cause | None:
    knows_more = evidence.origin or evidence.verdict or evidence.layer
    if evidence.kind != "gradient_not_finite" or knows_more or not evidence.now.applied:
        return None
    return Cause(
        "gradient",
        "the loss is finite, the global norm of the gradients is not, and the update was applied",
        "look at hooks and custom backwards, and go back to a checkpoint from before step "
        f"{evidence.now.step}",
    )


def _replay(evidence: CauseEvidence) -> Cause | None:
    verdict = evidence.verdict
    if verdict is not None and verdict.result == "not_covered":
        return Cause(
            "loss",
            f"the fault is outside of the network: {verdict.detail}",
            "look at the code between the network's output and the backward",
            micro_batch=outlier(evidence.blamed.factors),
        )
    transient = verdict is not None and verdict.detail == "transient"
    again = "; the same inputs, weights and random numbers gave finite values three times"
    if evidence.kind == "gradient_not_finite" and evidence.layer is not None:
        return Cause(
            "gradient",
            f"the loss is finite, and gradients are not from {evidence.layer} on, in the order of "
            f"the backward{again if transient else ''}",
            "look at hooks and custom backwards of this layer"
            + (f"; or {_NOT_AGAIN}" if transient else ""),
            is_in_layer=True,
        )
    if transient:
        return Cause("transient", again.removeprefix("; "), _NOT_AGAIN)
    return None


def _setting(evidence: CauseEvidence) -> Cause | None:
    changes = evidence.blamed.settings
    if not changes:
        return None
    return Cause(
        "setting",
        listed(changes),
        "look at what sets it, and whether it was meant",
    )


def _dead_layer(evidence: CauseEvidence) -> Cause | None:
    has_vanished = evidence.kind == "vanishing_gradient" and evidence.global_norm == 0
    if evidence.kind != "zero_gradient" and not has_vanished:
        return None
    dead = evidence.blamed.dead
    whole = has_vanished or len(dead) == len(evidence.blamed.names)
    return Cause(
        "dead_layer",
        f"the gradients of {'all layers' if whole else evidence.layer or dead[0]} are exactly zero",
        "look for a detached tensor, frozen inputs, or activations that are all cut off",
        is_in_layer=not whole,
    )


def _difference(evidence: CauseEvidence) -> Cause | None:
    found = evidence.blamed.difference
    if found is None:
        return None
    if found.by_hook:
        names = (found.name, *found.others)
        return Cause(
            "gradient",
            f"a hook has changed the gradient of {_counted(names, 'weights')} by {found.ratio:.3g} "
            "times its size, and has not done so in the step before",
            "look at hooks on weights and on outputs of modules",
            tensors=names,
            where="gradient",
        )
    times = f"{found.ratio:.3g} times as large as on the data of the step before"
    if found.ratio == 0:
        times = "zero, which it is not on the data of the step before"
    if found.where == "input":
        return Cause("data", f"input `{found.name}` is {times}", "look at the samples of this step")
    if found.where == "activation":
        what = f"the output of {found.name} is {times}, and what it has received is ordinary"
        advice = "look at the operations of this module, at its hooks and at its inputs"
    else:
        what = (
            f"in the order of the backward, a gradient of {found.name} is the first that is {times}"
        )
        advice = "look at hooks and custom backwards there"
    return Cause(found.where, what, advice, tensors=(found.name,), where=found.where)


def _gradient(evidence: CauseEvidence) -> Cause | None:
    loss_has_risen = any(map(has_higher_loss, evidence.ranks))
    if evidence.layer is None or loss_has_risen or evidence.kind not in _OF_GRADIENTS:
        return None
    return Cause(
        "gradient",
        f"only the gradients of {evidence.layer} have risen, the loss has not",
        "look at hooks and custom backwards of this layer",
        is_in_layer=True,
    )


_OF_GRADIENTS = ("spike", "local_norm_spike")
_OF_STEP = (*_OF_GRADIENTS, "loss_spike")

_RULES: tuple[Callable[[CauseEvidence], Cause | None], ...] = (
    rate_jump,
    _epsilon,
    _changed_outside,
    large_from_the_start,
    _setting,
    forward_cause,
    _ruined_state,
    _ruined_weights,
    _fallen_state,
    _optimizer_state,
    _grown_weight,
    scaled_outside,
    vanished,
    _applied_gradients,
    _buffers,
    _non_finite,
    _replay,
    scaled_loss,
    raised_rate,
    _dead_layer,
    _difference,
    dropped,
    _gradient,
    bad_data,
    growing_updates,
    large_updates,
)


_INFERRED = (
    _fallen_state,
    _optimizer_state,
    _grown_weight,
    vanished,
    scaled_loss,
    _difference,
    dropped,
    _gradient,
    bad_data,
)
"""Rules that compare a step with the steps before, which must have been good."""


def _change(state: StateNorm) -> str:
    what = "norm" if state.kind == "weight" else f"norm of {state.kind}"
    return f"the {what} of {state.name} went from {state.norm_before:.4g} to {state.norm:.4g}"


def _by_input(origin: Origin | None) -> str:
    """Return the first half of a sentence about what was ruined."""
    if origin is None or origin.where != "input":
        return "something has ruined "
    return f"non-finite values in input `{origin.name}` have ruined "


def _counted(names: Sequence[str], kind: str) -> str:
    return f"{names[0]} and {len(names) - 1} other {kind}" if len(names) > 1 else names[0]
