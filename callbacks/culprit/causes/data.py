"""Rules for a loss that has risen: on the data of a step, or by what is computed with them."""

import math
import statistics
from collections.abc import Sequence

from mfwrap.callbacks.culprit.anomaly_log import UNKNOWN_CAUSE
from mfwrap.callbacks.culprit.causes.evidence import (
    Cause,
    CauseEvidence,
    began_before,
    has_higher_loss,
    has_moved_far,
    has_ordinary_gradients,
    has_spoilt,
    odd_micro_batch,
    outlier,
    rises_of_loss,
)
from mfwrap.callbacks.culprit.rank_evidence import RankEvidence

_TOLERANCE = 0.05
"""Largest relative difference of changes of losses that are the same."""

_SAME = 0.03
"""Largest relative change of the loss of the same data that an ordinary update always explains."""

_NONE, _SHARE = 0.15, 0.4
"""Largest share of the rise that the data of the step before may have if the data of the step are
at fault, and the smallest one that they have if these are not."""

_MOST = 1.0
"""Largest rise of a loss that is as before, as a share of it, however far the step's has risen."""

_OF_NETWORK, _CLEAR = 0.5, 2.5
"""Smallest share of the rise that the losses which the network returned must have, and the rise of
the step's loss from which on that is asked: the data of one earlier step say little about less."""

_AGAIN = 0.25
"""Smallest share of its rise that a step must have once more if its data are at fault."""

_FAR = 10.0
"""Smallest ratio of the losses of some rows to the usual loss that makes them the cause."""

_ORDINARY_RATIO = 0.05
"""Largest ratio of an update to its weights that does not explain a rise of the loss."""

_LARGE_UPDATE = 2.5
"""Smallest rise of the updates that may have spoilt the weights."""


def changed_program(evidence: CauseEvidence) -> Cause | None:
    """Find that the program or the weights have changed: other data have a higher loss, too."""
    blamed = evidence.blamed
    share = _earlier_rise(blamed)
    if not _has_risen(evidence) or share <= 0 or blamed.earlier_loss is None:
        return None
    then, again = blamed.earlier_loss
    had = f"the data of the step before have {again / then:.3g} times the loss that they had"
    if share < _SHARE:
        return Cause(
            UNKNOWN_CAUSE,
            f"{_rise(blamed)}, and computed again, {had}",
            "look for what has changed in the program, and at the samples of this step",
        )
    if not _is_ordinary(evidence):
        return None
    what = f"computed again, {had} ({again:.4g}, not {then:.4g})"
    pairs = blamed.earlier_losses
    if (
        not blamed.odd_weights
        and len(pairs) > 1
        and all(before for before, _ in pairs)
        and (
            _are_alike([now / before for before, now in pairs])
            or _are_alike([now - before for before, now in pairs])
        )
    ):
        return Cause(
            "loss",
            f"{what}, all micro-batches by the same factor or amount, although the update between "
            "was ordinary",
            "look for a factor or a term of the loss that has changed",
        )
    return Cause(
        UNKNOWN_CAUSE,
        f"{what}, although the update between was ordinary: not the data have changed, but the "
        "weights or what is computed with them",
        "look for a setting, a mode or a branch that has changed in the program",
    )


def bad(evidence: CauseEvidence) -> Cause | None:
    """Find data that have raised the loss.

    They are named only where something speaks for them: one rank or micro-batch or a few rows have
    the rise, or the data of the step before have their loss again.
    """
    blamed = evidence.blamed
    began_elsewhere = began_before(blamed) or _began_behind(evidence)
    if not _has_risen(evidence) or _earlier_rise(blamed) > 0 or began_elsewhere:
        return None
    rose = _rise(blamed)
    others = [each for each in evidence.ranks if each.rank != blamed.rank]
    number = outlier(blamed.micro_losses)
    if others and not any(map(has_higher_loss, others)):
        return Cause(
            "rank_data",
            f"only the loss of rank {blamed.rank} has risen, to {blamed.loss:.4g}",
            "look at the data of this rank",
            micro_batch=odd_micro_batch(blamed),
        )
    has_rows = blamed.search is not None and bool(blamed.search.rows)
    if number is None and not has_rows:
        is_calm = has_ordinary_gradients(evidence)
        if is_calm or not blamed.earlier_losses:
            return _either(rose, evidence, is_calm=is_calm)
    where = "this step" if number is None else f"micro-batch {number}"
    if _share_again(blamed, number) < _AGAIN and not has_rows:
        return _elsewhere(rose, evidence, where)
    if _is_ordinary(evidence):
        why = "while weights and updates were ordinary"
    elif blamed.earlier_losses:
        why = "while those of the step before have their loss as before"
    else:
        return None
    return Cause(
        "data",
        _of_far_rows(blamed) or f"{rose} on the data of {where}, {why}",
        "look at the samples of this step",
        micro_batch=number,
    )


def shifted(evidence: CauseEvidence) -> Cause | None:
    """Find data that have had a higher loss for some steps, while earlier data have theirs."""
    found, shift = evidence.blamed.program, evidence.shift
    if found is None or shift is None or shift.of != "loss" or not 0 < shift.before < shift.now:
        return None
    rise = found.again / found.then - 1 if found.then > 0 else math.nan
    rises = rises_of_loss(evidence)
    if rises is None or not rises[1] - 1 > _OF_NETWORK * (rises[0] - 1):
        return None
    is_as_before = found.name is None and rise < min(_NONE * (shift.now / shift.before - 1), _MOST)
    share = _again(evidence.blamed.own_losses, shift.before / shift.now)
    if not (is_as_before and share > 1 - _AGAIN):
        return None
    return Cause(
        "data",
        f"{shift}; with the present weights, the data of {found.num_steps} steps before have "
        f"{found.again / found.then:.3g} times the loss that they had, and those of this step have "
        "theirs again",
        "look at the data of these steps, at their targets, and at what prepares them",
    )


def far_rows(evidence: CauseEvidence) -> Cause | None:
    """Find a few rows that were run apart, with losses far above what is usual of the step.

    That says enough even if it is unknown whether the loss of the step is unusual, as after a few
    steps, or in a run that has had such rows before; and of a loss that the Trainer computes.
    """
    has_moved = any(evidence.rise_of_updates(each) >= _LARGE_UPDATE for each in evidence.before)
    if evidence.kind not in {"loss_spike", "spike"} or has_moved or has_spoilt(evidence.before):
        return None
    said = _of_far_rows(evidence.blamed)
    return Cause("data", said, "look at the samples of this step") if said else None


def _of_far_rows(blamed: RankEvidence) -> str:
    """Return what the losses of a few rows are, in a clause; empty unless all are far too high."""
    rows = () if blamed.search is None else blamed.search.rows
    losses = [row.loss for row in rows if row.loss is not None]
    least = min(losses) if losses and len(losses) == len(rows) else math.nan
    if not 0 < _FAR * blamed.usual_loss < least < math.inf:
        return ""
    what = f"one row has a loss of {least:.4g}"
    if len(rows) > 1:
        what = f"{len(rows)} rows have losses of {least:.4g} or more"
    return f"{what} (usually {blamed.usual_loss:.4g})"


def _has_risen(evidence: CauseEvidence) -> bool:
    """Tell whether the loss has risen, and no update before has spoilt the weights."""
    has_moved = any(evidence.rise_of_updates(each) >= _LARGE_UPDATE for each in evidence.before)
    # What is computed again, is computed with the weights that the step has left.
    return has_higher_loss(evidence.blamed) and not (has_moved or has_spoilt([evidence.now]))


def _rise(blamed: RankEvidence) -> str:
    return f"the loss rose to {blamed.loss:.4g} (usually {blamed.usual_loss:.4g})"


def _elsewhere(rose: str, evidence: CauseEvidence, where: str) -> Cause | None:
    if has_spoilt(evidence.before):
        return None  # any loss may follow, and another one with the weights that are left
    return Cause(
        UNKNOWN_CAUSE,
        f"{rose}, and the data of {where} do not have it if they are computed again: not they are "
        "at fault, but what was computed with them",
        "look for code that does something else in some steps: hooks, counters, branches",
    )


def _either(rose: str, evidence: CauseEvidence, *, is_calm: bool) -> Cause | None:
    if has_spoilt(evidence.before) or not (is_calm or _is_ordinary(evidence)):
        return None
    what = "the gradients of all layers are" if is_calm else "the updates were"
    number = odd_micro_batch(evidence.blamed)
    where = "this step" if number is None else f"micro-batch {number}"
    return Cause(
        UNKNOWN_CAUSE,
        f"{rose}, and {what} ordinary: either the data of {where} are at fault, or the "
        "computation of the loss",
        "look at the samples of this step, and at what has changed in the program",
        micro_batch=number,
    )


def _are_alike(changes: Sequence[float]) -> bool:
    """Tell whether changes of losses are the same but for the update between."""
    return max(changes) - min(changes) < _TOLERANCE * abs(statistics.fmean(changes))


def _earlier_rise(blamed: RankEvidence) -> float:
    """Return how much of the loss's rise the data of the step before have now, as a share.

    0 if it is unknown, or if they have their loss again.
    """
    if blamed.earlier_loss is None:
        return 0.0
    # As ratios: the loop may divide the losses of the micro-batches by another number.
    then, again = blamed.earlier_loss
    if 0 in {then, blamed.usual_loss}:
        return 0.0
    rise = again / then - 1
    if math.isnan(rise):
        return math.inf
    share = rise / max(abs(blamed.loss / blamed.usual_loss - 1), _SAME)
    return 0.0 if abs(rise) < _SAME or (abs(share) < _NONE and rise < _MOST) else share


def _began_behind(evidence: CauseEvidence) -> bool:
    """Tell whether most of the rise began behind the network, which returned other losses."""
    rises = rises_of_loss(evidence)
    return rises is not None and 1 + (rises[1] - 1) / _OF_NETWORK < rises[0] > _CLEAR


def _share_again(blamed: RankEvidence, number: int | None) -> float:
    """Return how much of its rise the step, or a micro-batch, has once more; 1 if unknown."""
    pairs = blamed.own_losses
    if not pairs or blamed.loss == 0:
        return 1.0
    usual = blamed.usual_loss / blamed.loss
    if number is not None:
        others = [then for place, (then, _) in enumerate(pairs) if place != number]
        pairs = (pairs[number],)
        usual = statistics.median(others) / pairs[0][0] if others and pairs[0][0] else 1.0
    share = _again(pairs, usual)
    return 1.0 if math.isnan(share) else share


def _again(pairs: Sequence[tuple[float, float]], usual: float) -> float:
    """Return how much of their rise losses have once more; NaN if unknown.

    Args:
        pairs: Losses then and again.
        usual: Usual loss, as a share of that then.
    """
    if not pairs:
        return math.nan
    then, again = (statistics.fmean(each) for each in zip(*pairs, strict=True))
    known = then != 0 and usual < 1 and math.isfinite(again)
    return (again / then - usual) / (1 - usual) if known else math.nan


def _is_ordinary(evidence: CauseEvidence) -> bool:
    """Tell whether the updates before were small, so that the weights cannot explain a rise."""
    ratios = [each.scores.update_ratio for each in evidence.before]
    is_small = bool(ratios) and all(ratio < _ORDINARY_RATIO for ratio in ratios)
    return is_small and not has_moved_far(evidence.before)
