"""Evidence of an anomaly and its cause, as the rules take and return them."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from mfwrap.callbacks.culprit.anomaly_log import Kind
from mfwrap.callbacks.culprit.judges.course import HIGHER, Shift
from mfwrap.callbacks.culprit.judges.growth import Growth
from mfwrap.callbacks.culprit.judges.rates import LEAST_RISE, RateRise
from mfwrap.callbacks.culprit.judges.step import LIMITS, StepScores
from mfwrap.callbacks.culprit.rank_evidence import RankEvidence
from mfwrap.callbacks.culprit.replay.replay import Origin
from mfwrap.callbacks.culprit.replay.verdict import Verdict

_FEW_STEPS = 3
"""Number of steps before an anomaly among which an update may be its cause."""

_SHARE_BEFORE = 0.4
"""Smallest share of the rise of a step's loss that the step before has if it began there."""

SPOILT = 0.3
"""Smallest ratio of an update to its weights that explains any rise of the loss after it."""

_CALM = 3.0
"""Largest score of the norms of ordinary gradients."""


class Cause(NamedTuple):
    """Cause of an anomaly in words."""

    name: str
    """One of the names that ``docs/how-to/find_a_nan.md`` lists."""

    explanation: str
    """A clause that says what happened, with its numbers."""

    suggestion: str
    """What to do, one clause; empty if the cause is unknown."""

    is_in_layer: bool = False
    """Whether the layer where the fault shows is the layer of the cause. A rate that is too high,
    for example, is in no layer."""

    tensors: tuple[str, ...] = ()
    """Weights, buffers or modules that are the cause, the worst first. If they are all in one
    layer, it is the layer of the cause."""

    where: str | None = None
    """Kind of these tensors, see ``Anomaly.where``."""

    micro_batch: int | None = None
    """Micro-batch of the cause; ``None`` if it is in several, or unknown."""

    is_provisional: bool = False
    """Whether the cause of a later rule is better: this one says only what was ruled out."""


class StepTrace(NamedTuple):
    """What is known about one of the last steps."""

    step: int
    applied: bool
    scores: StepScores
    rate_rise: RateRise | None = None
    """Rise of the learning rate in the step; ``None`` if it is ordinary."""

    loss: float = math.nan
    global_norm: float | None = None
    terms: Mapping[str, float] = MappingProxyType({})
    """Losses that were reported by name, such as the terms of the loss."""

    def rate_lasts(self, rate: float) -> bool:
        """Tell whether a later rate is as high as the rise of this step made it."""
        return self.rate_rise is not None and rate >= LEAST_RISE * self.rate_rise.before


@dataclass(frozen=True, kw_only=True, slots=True)
class CauseEvidence:
    """What is known about an anomaly."""

    kind: Kind
    trace: Sequence[StepTrace]
    """The last steps, the one that went wrong at the end."""

    ranks: Sequence[RankEvidence]
    """Evidence of the ranks that are known: all of them, or this one."""

    blamed: RankEvidence
    """The rank with the best evidence."""

    is_first: bool = True
    """Whether the step begins an episode. Later steps may show its consequences, and not ask again
    what speaks against a cause."""

    knows_optimizer: bool = False
    """Whether the optimizer's state could be read."""

    layer: str | None = None
    """The only layer whose gradients have risen; ``None`` if there are several or none."""

    origin: Origin | None = None
    """Place of the first non-finite value, from a replay."""

    verdict: Verdict | None = None
    """Result of the replay."""

    growth: Growth | None = None
    """Growth of the updates in the last steps; ``None`` if they have not grown."""

    shift: Shift | None = None
    """Shift of the loss or the global norm, if the anomaly is one."""

    raised: StepTrace | None = None
    """Step in which the learning rate has risen to what it still is; ``None`` if it has not."""

    since: int | None = None
    """First step in which the fault shows, or may have begun if it was looked for in some only."""

    diverged_step: int | None = None
    """First step of an earlier divergence that has ruined the weights; ``None`` without one."""

    rate_step: int | None = None
    """Step of the last episode, if a rate that is still as high was its cause; else ``None``."""

    run_away: str = ""
    """What a loss without a lower bound has done, if it has dropped in this step."""

    global_norm: float | None = None

    @property
    def now(self) -> StepTrace:
        """The step that went wrong."""
        return self.trace[-1]

    @property
    def has_norms(self) -> bool:
        """Whether norms of the gradients are known."""
        return self.global_norm is not None or bool(self.blamed.names)

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients of the step are known to be finite."""
        norm = self.global_norm
        return norm is not None and math.isfinite(norm) and math.isfinite(self.blamed.loss)

    @property
    def first_bad_step(self) -> int:
        """First step whose state may have the fault; the checkpoint to return to is older."""
        return self.now.step if self.since is None else self.since

    @property
    def before(self) -> list[StepTrace]:
        """The few applied steps before, the last one first.

        If only a sample has shown the anomaly, it may be any update since the sample before.
        """
        applied = [each for each in reversed(self.trace[:-1]) if each.applied]
        return applied if self.kind == "state_spike" else applied[:_FEW_STEPS]

    def rise_of_updates(self, step: StepTrace) -> float:
        """Return the ratio of the middle weight's update to the usual one, at the same rate.

        It is the ratio to the largest of the steps before; 0 if fewer than three are known.
        """
        earlier = [update_per_rate(each) for each in self._applied_before(step)]
        return _rise(update_per_rate(step), earlier)

    def rise_of_norm(self, step: StepTrace) -> float:
        """Return the ratio of a step's global norm to the usual one, as `rise_of_updates` does."""
        earlier = [each.global_norm or 0.0 for each in self._applied_before(step)]
        return _rise(step.global_norm or 0.0, earlier)

    def _applied_before(self, step: StepTrace) -> list[StepTrace]:
        return [each for each in self.trace if each.step < step.step and each.applied]

    @property
    def updates(self) -> list[StepTrace]:
        """The steps whose update may be the cause, the last one first."""
        with_now = self.kind in {"update_spike", "state_spike", "learning_rate_spike"}
        return [*([self.now] if with_now else []), *self.before]

    @property
    def buffers(self) -> list[str]:
        """Buffers that have become non-finite or have risen."""
        risen = [one.name for one in self.blamed.states if one.kind == "buffer"]
        return list(dict.fromkeys([*self.blamed.buffers, *risen]))


def _rise(now: float, earlier: Sequence[float]) -> float:
    """Return the ratio of a value to the largest one before; 0 if it or most others are unknown."""
    known = [value for value in earlier if value > 0]
    return now / max(known) if len(known) >= _FEW_STEPS and now > 0 else 0.0


def has_moved_far(steps: Sequence[StepTrace], limit: float = LIMITS["update"]) -> bool:
    """Tell whether the update of any of these steps was far larger than usual."""
    return any(each.scores.num_moved > 0 or each.scores.update > limit for each in steps)


def has_spoilt(steps: Sequence[StepTrace]) -> bool:
    """Tell whether any of these steps has changed the weights so far that any loss may follow."""
    return any(each.scores.update_ratio > SPOILT for each in steps)


def update_per_rate(step: StepTrace) -> float:
    """Return the middle weight's update, as a ratio to the weight, divided by the learning rate."""
    rate = step.scores.learning_rate
    return step.scores.update_ratio / (rate if rate > 0 else 1.0)


def outlier(values: Sequence[float]) -> int | None:
    """Return the number of the only value that is not finite, or five times the others' median."""
    bad = [number for number, value in enumerate(values) if not math.isfinite(value)]
    if bad:
        return bad[0] if len(bad) == 1 else None
    for number, value in enumerate(values):
        others = sorted(abs(each) for place, each in enumerate(values) if place != number)
        if others and abs(value) > 5 * others[len(others) // 2]:
            return number
    return None


def odd_micro_batch(blamed: RankEvidence) -> int | None:
    """Return the number of the only micro-batch with another loss, also of one outside."""
    return outlier(blamed.micro_losses or blamed.outer_losses)


def counted(names: Sequence[str], kind: str) -> str:
    """Name the first of some tensors, and say how many others there are."""
    return f"{names[0]} and {len(names) - 1} other {kind}" if len(names) > 1 else names[0]


def has_ordinary_gradients(evidence: CauseEvidence) -> bool:
    """Tell whether the loss has risen, and no gradient has."""
    scores = [*evidence.blamed.scores, evidence.now.scores.global_norm]
    judged = [score for score in scores if not math.isnan(score)]
    is_calm = bool(judged) and max(map(abs, judged)) < _CALM
    return evidence.kind == "loss_spike" and is_calm


def began_before(blamed: RankEvidence) -> bool:
    """Tell whether the step before had much of the rise, so that it tells nothing of this step."""
    if not blamed.earlier_loss or not blamed.own_losses:
        return False
    own = statistics.fmean(then for then, _ in blamed.own_losses)
    if own == 0 or blamed.loss == 0:
        return False
    usual = blamed.usual_loss / blamed.loss
    return blamed.earlier_loss[0] / own - usual > _SHARE_BEFORE * (1 - usual) > 0


def rises_of_loss(evidence: CauseEvidence) -> tuple[float, float] | None:
    """Return by which factors the loss of the step has risen, and that of the network's calls.

    As ratios, because the loop may divide the losses of the micro-batches by another number.

    Returns:
        ``None`` if a loss is unknown, or not above zero.
    """
    blamed, shift = evidence.blamed, evidence.shift
    usual, now = blamed.usual_loss, blamed.loss
    if len(evidence.trace) > 1 and math.isfinite(evidence.trace[-2].loss):
        usual = evidence.trace[-2].loss  # of the same rows as the earlier calls
    earlier, losses = [then for then, _ in blamed.earlier_losses], blamed.micro_losses
    if shift is not None and shift.of == "loss":
        usual, now = shift.before, shift.now
        # Of the earlier step, the first call was kept.
        earlier = [] if blamed.program is None else [blamed.program.then]
        losses = losses[:1]
    if not (earlier and losses):
        return None
    before, own = statistics.fmean(earlier), statistics.fmean(losses)
    return (now / usual, own / before) if min(usual, now, before, own) > 0 else None


def has_higher_loss(rank: RankEvidence) -> bool:
    """Tell whether the loss of a rank has clearly risen."""
    return rank.loss_score > HIGHER
