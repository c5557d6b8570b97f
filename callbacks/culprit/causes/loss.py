"""Rules for causes that lie in the loss, or between the loss and the gradients."""

import math
import statistics
from collections.abc import Mapping

from mfwrap.callbacks.culprit.anomaly_log import OF_TERMS, UNKNOWN_CAUSE
from mfwrap.callbacks.culprit.causes.evidence import (
    Cause,
    CauseEvidence,
    began_before,
    has_ordinary_gradients,
    has_spoilt,
    outlier,
    rises_of_loss,
)
from mfwrap.callbacks.culprit.judges.course import RECENT

_MULTIPLIED = 15.0
"""Smallest rise of a loss, or of its gradient, that may be a factor in the loss."""

_SCALED, _LIKE_THE_LOSS = 6.0, 2.0
"""Smallest rise of loss and gradients that may be a factor in the loss, and the largest ratio of
the two. Of a squared error, the gradients rise as the root of the loss."""

_UNIFORM, _ODD = 4.0, 0.1
"""Largest ratio of the rise of a group to that of the middle one if all were multiplied alike, and
the share of the groups, at each end, that may be farther."""

_FEWEST_ROWS, _LIKE_ROWS = 2, 0.15
"""Smallest number of rows, and the largest difference of their losses as a share of their rise, if
they have risen by the same amount."""

_SHARE = 0.01
"""Smallest share of the usual global norm at which a group's rise is compared with the others'."""

_ALIKE = 2.0
"""Largest ratio of two losses that are alike but for their sign."""

_OUTSIDE_RISE, _OUTSIDE_SHARE = 2.5, 0.2
"""Smallest rise of the step's loss that began behind the network, and the largest share of it that
the network's own losses have."""

_RISEN_TERM = 3.0
"""Smallest ratio of a term of the loss to its usual value that is named."""

_OUTSIDE = "look at the code between the network's output and the backward"

_FACTOR = "look for a factor in the loss, such as a wrong reduction or weight"


def scaled_outside(evidence: CauseEvidence) -> Cause | None:
    """Find a factor between the loss of the network and the backward, by the loss's gradient."""
    if evidence.origin is not None:
        return None  # a value that is not finite makes the factor so
    if any(factor < 0 for factor in evidence.blamed.factors):
        return Cause(
            "loss",
            "the loss was multiplied by a negative number before the backward",
            "look for a wrong sign: the updates raise the loss of the network",
        )
    number = outlier(evidence.blamed.factors)
    change = evidence.blamed.factor_change
    if number is None and not (change is not None and change >= _MULTIPLIED):
        return None
    what = "the loss" if number is None else f"the loss of micro-batch {number}"
    return Cause(
        "loss",
        f"{what} was multiplied before the backward",
        _OUTSIDE,
        micro_batch=number,
    )


def risen_outside(evidence: CauseEvidence) -> Cause | None:
    """Find that the loss of the step has risen, and those that the network returned have not."""
    rises, search = rises_of_loss(evidence), evidence.blamed.search
    # A few rows may have the rise, in what is computed with them outside of the network.
    if rises is None or (search is not None and search.rows):
        return None
    whole, own = rises
    # Under a shift, the steps before are part of it.
    if evidence.shift is None and began_before(evidence.blamed):
        return None
    if whole < _OUTSIDE_RISE or not own < 1 + _OUTSIDE_SHARE * (whole - 1):
        return None
    return Cause(
        "loss",
        f"the loss of the step is {whole:.3g} times the usual one, and what the network returned "
        f"is {own:.3g} times that of an earlier step",
        "look at the code between the network's output and the backward: losses that are added "
        "up, or divided by another number",
    )


def scaled(evidence: CauseEvidence) -> Cause | None:
    """Find a factor in the loss: the gradients of all layers have risen like the loss."""
    blamed = evidence.blamed
    # Small norms vary by large factors.
    least = _SHARE * evidence.now.scores.usual_global_norm
    rises = sorted(
        blamed.rise(number)
        for number, usual in enumerate(blamed.usual_norms)
        if blamed.is_judged(number) and usual >= least
    )
    rise = blamed.loss / blamed.usual_loss if blamed.usual_loss > 0 else math.nan
    # Of a loss that is less than at first, the gradients rise like the loss with any bad data.
    is_little = blamed.first_loss is not None and blamed.loss < blamed.first_loss
    is_explained = has_spoilt(evidence.before) or evidence.raised is not None
    # A factor is in the losses of all rows, and that of the program in those of all micro-batches.
    has_rows = blamed.search is not None and bool(blamed.search.rows)
    is_outer = not blamed.micro_losses and outlier(blamed.outer_losses) is not None
    is_explained |= has_rows or is_outer
    if not rises or not rise >= _SCALED or is_little or is_explained:
        return None
    middle, num_odd = rises[len(rises) // 2], int(_ODD * len(rises))
    low, high = rises[num_odd], rises[-1 - num_odd]
    is_uniform = low > middle / _UNIFORM and high < middle * _UNIFORM
    if not is_uniform or not 1 / _LIKE_THE_LOSS <= middle / rise <= _LIKE_THE_LOSS:
        return None
    return Cause(
        "loss",
        f"the loss and the gradients of all layers are about {rise:.3g} times the usual ones",
        _FACTOR,
        micro_batch=outlier(blamed.micro_losses),
    )


def common_term(evidence: CauseEvidence) -> Cause | None:
    """Find a term that raises the loss of all rows by the same amount, and no gradient."""
    blamed = evidence.blamed
    known = () if blamed.search is None else blamed.search.losses
    number = outlier(blamed.micro_losses)
    losses = [loss for place, loss in known if number in {None, place}]
    others = [loss for place, loss in known if number not in {None, place}]
    if len(losses) < _FEWEST_ROWS or not has_ordinary_gradients(evidence):
        return None
    rise = statistics.fmean(losses) - (statistics.fmean(others) if others else blamed.usual_loss)
    if rise <= 0 or max(losses) - min(losses) > _LIKE_ROWS * rise:
        return None
    return Cause(
        "loss",
        f"the losses of {len(losses)} rows have risen by about {rise:.4g} alike, and the gradients "
        "of all layers are ordinary",
        "look for a term of the loss that has changed",
        micro_batch=number,
    )


def ruined_outside(evidence: CauseEvidence) -> Cause | None:
    """Find a loss that became non-finite behind the network, which returned finite ones."""
    losses = evidence.blamed.micro_losses
    is_ruined = evidence.kind == "loss_not_finite" and not math.isfinite(evidence.blamed.loss)
    if not is_ruined or not losses or not all(map(math.isfinite, losses)):
        return None
    return Cause(
        "loss",
        "the losses that the network returned are finite, the loss of the step is not",
        "look at the code between the network's output and the backward",
    )


def naming_terms(cause: Cause, evidence: CauseEvidence) -> Cause:
    """Return a cause with the terms of the loss in which it shows, if there are several.

    The terms are those that were reported by name. Of a loss that is not finite, they are those
    that are not finite themselves; of a spike, those that have risen threefold, if not all have.
    """
    terms, said, what = evidence.blamed.terms, "", "the loss has risen"
    may_be_loss = len(terms) > 1 and cause.name in {"loss", UNKNOWN_CAUSE}
    if may_be_loss and evidence.kind == "loss_not_finite":
        said, what = _terms_not_finite(terms), "the loss is not finite"
    elif (may_be_loss or cause.name == "data") and evidence.kind in {"loss_spike", "spike"}:
        said = _risen_terms(evidence)
    if not said:
        return cause
    return cause._replace(explanation=f"{cause.explanation or what}{OF_TERMS}{said}")


def _terms_not_finite(terms: Mapping[str, float]) -> str:
    bad = [name for name, loss in terms.items() if not math.isfinite(loss)]
    numbers = ", ".join(f"{name} {loss:.4g}" for name, loss in terms.items())
    verb = "is" if len(bad) == 1 else "are"
    return f"{' and '.join(bad)} {verb} not finite ({numbers})" if bad else ""


def _risen_terms(evidence: CauseEvidence) -> str:
    terms = evidence.blamed.terms
    usual = {name: _usual_term(name, evidence) for name in terms}
    risen = [name for name, loss in terms.items() if loss > _RISEN_TERM * usual[name] > 0]
    said = [f"{name} has risen to {terms[name]:.4g} (usually {usual[name]:.4g})" for name in risen]
    return " and ".join(said) if len(said) < len(terms) else ""


def _usual_term(name: str, evidence: CauseEvidence) -> float:
    """Return the median of a term in the last steps before this one; NaN if it is unknown."""
    known = [each.terms.get(name, math.nan) for each in evidence.trace[:-1] if each.applied]
    finite = [loss for loss in known if math.isfinite(loss)]
    return statistics.median(finite[-RECENT:]) if finite else math.nan


def vanished(evidence: CauseEvidence) -> Cause | None:
    """Find why the global norm has fallen to almost nothing."""
    norm, usual = evidence.global_norm, evidence.now.scores.usual_global_norm
    if evidence.kind != "vanishing_gradient" or norm is None:
        return None
    blamed = evidence.blamed
    share = abs(blamed.loss / blamed.usual_loss) if blamed.usual_loss else math.nan
    change = blamed.factor_change
    # A rate that is too high may throw the loss anywhere.
    if share < 1 / _MULTIPLIED and evidence.raised is None:
        return _fallen_loss(share)
    if change is not None and change < 1 / _MULTIPLIED:
        return Cause(
            "loss",
            f"the loss was multiplied by {change:.3g} before the backward",
            _OUTSIDE,
        )
    if norm == 0 or evidence.raised is not None:
        return None
    what = f"the global norm is {norm / usual:.3g} times the usual one, the loss has not fallen"
    if change is None:
        advice = "look at hooks and custom backwards, and at factors between loss and backward"
        return Cause(UNKNOWN_CAUSE, what, advice)
    return Cause(
        "gradient",
        f"{what}, and the backward began with an ordinary gradient",
        "look at hooks, at custom backwards, and at what cuts activations off",
    )


def dropped(evidence: CauseEvidence) -> Cause | None:
    """Find a factor in a loss that has dropped at once."""
    blamed = evidence.blamed
    if evidence.kind != "loss_drop" or not blamed.usual_loss > 0:
        return None
    losses = blamed.micro_losses
    low = [
        number
        for number, loss in enumerate(losses)
        for others in [losses[:number] + losses[number + 1 :]]
        if others and abs(loss) < min(map(abs, others)) / _MULTIPLIED
    ]
    share = blamed.loss / blamed.usual_loss
    if low:
        share = losses[low[0]] / statistics.fmean(losses[: low[0]] + losses[low[0] + 1 :])
        what = f"the loss of micro-batch {low[0]} is {share:.3g} times that of the others"
    else:
        what = f"the loss is {share:.3g} times the usual one"
    if -_ALIKE < share < -1 / _ALIKE:
        return Cause(
            "loss",
            f"{what}: it was never below zero before, and has changed its sign",
            "look for a wrong sign in the loss: the updates raise what they have lowered",
        )
    if share == 0 or abs(share) > 1 / _MULTIPLIED:
        return Cause(
            UNKNOWN_CAUSE,
            f"{what}: either the data of this step are at fault, or the computation of the loss",
            "look for targets that are given away or left out, and for a factor in the loss",
        )
    return Cause(
        "loss",
        what,
        _FACTOR,
        micro_batch=low[0] if low else None,
    )


def _fallen_loss(share: float) -> Cause:
    if share == 0:
        return Cause(
            UNKNOWN_CAUSE,
            "the loss and all gradients are exactly zero",
            "look for a batch without targets, or a factor of zero in the loss",
        )
    return Cause(
        "loss",
        f"the loss and all gradients are about {share:.3g} times the usual ones",
        _FACTOR,
    )
