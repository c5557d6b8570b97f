"""Rules for causes that lie in the learning rate, or in the size of updates."""

import math
import statistics
from collections.abc import Sequence

from mfwrap.callbacks.culprit.anomaly_log import NON_FINITE, UNKNOWN_CAUSE
from mfwrap.callbacks.culprit.causes.evidence import (
    Cause,
    CauseEvidence,
    StepTrace,
    update_per_rate,
)

LOWER_RATE = "lower the learning rate, or warm it up over more steps"
"""What to do if updates have been too large, not since a jump of the rate. The weights from before
such updates are those of the start."""

MUCH_LOWER_RATE = "lower the learning rate by orders of magnitude"
"""As `LOWER_RATE`, if no warm-up helps."""

BEFORE_STEP = "go back to a checkpoint from before step"
"""Advice if the rate was good until then; the number of the step follows."""

_CORRECT = f"correct the learning rate or its schedule, and {BEFORE_STEP}"

LARGE_RATIO, _HUGE_RATIO = 1.0, 10.0
"""Smallest ratio of an update to its weights that is too large, wherever it comes from, and of one
at the rate that was set which no warm-up would make ordinary."""

ROW_RATIO, IN_A_ROW = 0.15, 8
"""Smallest ratio of each of some updates in a row that are too large together, and their number.
Weights that begin at zero have six of them."""

_EARLY = 2
"""Last step at which the steps that are known count as the start of the run."""

_FEW_LARGE = 3
"""Number of first updates that tell whether the rate was too high from the start."""

_JUMP = 10.0
"""Largest ratio of an update to the first one, at the same rate, that was too large as well."""

_SCALED = 1.01
"""Smallest ratio of the rate that a schedule was given to that of a step from which on both are
named."""

_ORDINARY = 0.03
"""Largest ratio of an update to its weights that is ordinary; 0.001 is usual."""

_FEWEST = 2
"""Smallest number of updates that tell that they were large all along."""

_MANY, _GROWN = 8, 1.2
"""Number of large updates without a rise of the loss that have not made it rise now, unless they
have grown by this factor."""

_ALL_LARGE, _DOUBTFUL = 0.1, 0.01
"""Smallest middle ratio of all updates before a rise that makes the rate its cause, and the one
that is worth a word if nothing else is known. Small networks learn well at ratios of 0.06."""


def jump(evidence: CauseEvidence) -> Cause | None:
    """Find a jump of the learning rate, or a negative rate, in this step or shortly before."""
    steps = [evidence.now] if evidence.kind == "learning_rate_spike" else evidence.before
    return _rate_of(steps)


def raised(evidence: CauseEvidence) -> Cause | None:
    """Find a learning rate that has jumped some time ago, and is as high since then."""
    return None if evidence.raised is None else _rate_of([evidence.raised])


def _rate_of(steps: Sequence[StepTrace]) -> Cause | None:
    for each in steps:
        if each.scores.lowest_rate < 0:
            return Cause(
                "learning_rate",
                f"the learning rate of step {each.step} was {each.scores.lowest_rate:.3g}: with a "
                "negative rate an update raises the loss",
                f"{_CORRECT} {each.step}",
            )
        if each.rate_rise is not None:
            before, now, number = each.rate_rise
            ratio = float(f"{each.rate_rise.ratio:.3g}")
            span = "in one step" if number == 1 else f"over {number} steps"
            return Cause(
                "learning_rate",
                f"the learning rate of step {each.step} was {now:.3g}: it has risen {span} to "
                f"{ratio:g} times the rates before, which were {before:.3g} at most",
                f"{_CORRECT} {each.step - number + 1}",
            )
    return None


def large_from_the_start(evidence: CauseEvidence) -> Cause | None:
    """Find updates as large as the weights that began before anything else was unusual."""
    steps = [each for each in evidence.trace if each.applied]
    if not steps or steps[0].step > _EARLY or steps[0].scores.num_moved > 0:
        return None
    return large_updates(evidence, steps[:_FEW_LARGE])


def large_in_a_row(rate: float) -> Cause:
    """Return the cause of what follows updates in a row that were too large together.

    Args:
        rate: Learning rate of the last one.
    """
    return Cause(
        "learning_rate",
        f"each of {IN_A_ROW} updates in a row changed the weights by more than {ROW_RATIO} times "
        f"their size (0.001 is ordinary), the last one at a learning rate of {rate:.3g}",
        LOWER_RATE,
    )


def large_updates(
    evidence: CauseEvidence, steps: Sequence[StepTrace] | None = None
) -> Cause | None:
    """Find an update as large as the weights, in these steps or just before the anomaly."""
    known = evidence.updates if steps is None else steps
    found = [each for each in known if LARGE_RATIO <= each.scores.update_ratio < math.inf]
    is_weak = evidence.kind in NON_FINITE and not evidence.blamed.has_moved
    if is_weak or not found:
        return None
    first = min(found, key=lambda each: each.step)
    ratio = first.scores.update_ratio
    # Updates of SGD grow with the gradients, which such a rate makes grow: some of the first may
    # be smaller, but they are not ordinary, either.
    share = min(1 / _JUMP, _ORDINARY / ratio)
    earlier = [update_per_rate(each) for each in evidence.trace if each.step < first.step]
    if any(0 < update < update_per_rate(first) * share for update in earlier):
        return None  # ordinary at this rate before
    rate = first.scores.learning_rate
    at_rate = "" if math.isnan(rate) else f", at learning rate {rate:.3g},"
    # In a warm-up, the rate of the step is not the one that the user has set.
    initial, at_most = evidence.blamed.initial_rate, ratio
    if initial is not None and initial > _SCALED * rate:
        at_rate += f" which the schedule makes of {initial:.3g},"
        at_most *= initial / rate if rate > 0 else 1.0
    return Cause(
        "learning_rate",
        f"the update of step {first.step}{at_rate} changed the weights by {ratio:.3g} "
        "times their size (0.001 is ordinary)",
        MUCH_LOWER_RATE if at_most >= _HUGE_RATIO else LOWER_RATE,
    )


def large_all_along(evidence: CauseEvidence) -> Cause | None:
    """Find that most updates were large before a loss rose, though none was as large as a weight.

    Clipping makes them so: with SGD it holds each update at the learning rate, whatever the loss.
    """
    has_risen = evidence.kind == "loss_spike" or (
        evidence.shift is not None and evidence.shift.of == "loss"
    )
    early = 0.0 if evidence.shift is None else evidence.shift.update
    start = evidence.now.step if early else evidence.first_bad_step
    steps = [each for each in evidence.trace if each.applied and each.step < start]
    ratios = [each.scores.update_ratio for each in steps if each.scores.update_ratio > 0]
    if not has_risen or len(ratios) < _FEWEST:
        return None
    # Updates that have made the weights large are smaller beside these than the first ones were.
    ratio = early or statistics.median(ratios)
    rate = max(each.scores.learning_rate for each in steps)
    if not _DOUBTFUL <= ratio < math.inf:
        return None
    at_rate = "" if math.isnan(rate) else f", at learning rates of up to {rate:.3g},"
    what = "" if evidence.shift is None else f"{evidence.shift}; "
    by = f"up to {ratio:.3g} times their size" if early else f"{ratio:.3g} times their size each"
    explanation = (
        f"{what}the updates before{at_rate} changed the weights by {by} (0.001 is ordinary)"
    )
    initial = evidence.blamed.initial_rate
    if initial is not None and rate > _SCALED * initial and ratio > _ORDINARY:
        return Cause(
            "learning_rate",
            f"{explanation}; the schedule has raised the learning rate from {initial:.3g}",
            "correct the schedule, or begin with a lower learning rate",
        )
    if ratio < _ALL_LARGE or (not early and _are_usual(ratios, steps[0].step)):
        advice = "lower the learning rate if data and program are as before"
        return Cause(UNKNOWN_CAUSE, explanation, advice)
    return Cause("learning_rate", explanation, LOWER_RATE)


def _are_usual(ratios: Sequence[float], first_step: int) -> bool:
    """Tell whether the run has learned with updates that were as large, and have not grown.

    Args:
        ratios: Ratios of the updates that are known, to the weights.
        first_step: Step of the first of them. There may have been many before.
    """
    half = len(ratios) // 2
    first, last = statistics.median(ratios[:half]), statistics.median(ratios[half:])
    return (len(ratios) >= _MANY or first_step > _EARLY) and last < _GROWN * first


def growing_updates(evidence: CauseEvidence) -> Cause | None:
    """Find updates that have grown for many steps, at a rate that has not."""
    growth = evidence.growth
    if evidence.kind != "update_growth" or growth is None:
        return None
    return Cause(
        "update_growth",
        f"the middle weight's update grew from {growth.before:.3g} to {growth.now:.3g} of its size "
        f"in {growth.num_steps} updates, at a learning rate that has not risen",
        "lower the learning rate, or the weight decay if the weights shrink",
    )
