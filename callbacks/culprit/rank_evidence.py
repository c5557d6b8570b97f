"""Evidence of each rank about a bad step, and whether the loss scale explains the step."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mfwrap.callbacks.culprit.anomaly_log import GroupNorm, StateNorm
from mfwrap.callbacks.culprit.judges.forward import ForwardRise
from mfwrap.callbacks.culprit.judges.settings import SettingChange
from mfwrap.callbacks.culprit.replay.difference import Difference
from mfwrap.callbacks.culprit.replay.reference import ProgramChange
from mfwrap.callbacks.culprit.replay.rows import RowSearch

_HEADROOM = 64.0
"""Largest plausible ratio of a gradient's element to the usual norm of its group. The ratio also
covers elements of intermediate gradients in the backward pass."""

_HIGHER = 5.0
"""Smallest ratio of a gradient to the usual one that explains a large update."""

LARGEST_FLOAT16 = 65504.0

_SPREAD = 1e4
"""Largest plausible ratio of the norms of two groups in one step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEvidence:
    """What one rank knows about a step."""

    rank: int
    loss: float
    names: tuple[str, ...]
    """Names of the groups of local norms; empty if the step has no local norms."""

    norms: tuple[float, ...]
    """Local norm of each group."""

    usual_norms: tuple[float, ...]
    """Norm that was expected of each group; NaN for a group without a norm so far."""

    loss_scale: float | None = None
    """Loss scale of the step; ``None`` counts as 1."""

    in_float16: bool = False
    """Whether the network was seen to compute in float16."""

    usual_global_norm: float | None = None
    """Global norm that was expected; ``None`` before the first applied update."""

    scores: tuple[float, ...] = ()
    """Score of each group's norm; NaN if unknown, and far below the global norm."""

    dead: tuple[str, ...] = ()
    """Groups whose norm is zero now and in the step before, although they had gradients."""

    loss_score: float = math.nan
    usual_loss: float = math.nan
    diverged_step: int | None = None
    """First step of an earlier divergence that has ruined the weights; ``None`` without one."""

    rate_step: int | None = None
    """Step of the last episode, if a rate that is still as high was its cause; else ``None``."""

    first_loss: float | None = None
    """Median of the first losses of the run; ``None`` if it is unknown."""

    moved: tuple[str, ...] = ()
    """Weights whose update is an anomaly."""

    impossible: Mapping[str, float] = field(default_factory=dict)
    """Updates, divided by the rate, that no moments of Adam give, by the weight's name."""

    follows_gradients: bool = False
    """Whether the updates are the gradients times the rate, perhaps added up: those of SGD."""

    initial_rate: float | None = None
    """Largest rate that a schedule was given to begin with, which it scales in each step; ``None``
    without a schedule."""

    driven: tuple[str, ...] = ()
    """Weights whose updates since the last sample explain that they have grown."""

    undivided: Mapping[str, str] = field(default_factory=dict)
    """Those of the weights that have moved, risen or become non-finite whose update Adam divides by
    zero, each with the reason."""

    forward: tuple[ForwardRise, ...] = ()
    """Attention logits and loads of experts that were an anomaly when they were last watched, the
    module that has risen most first."""

    settings: tuple[SettingChange, ...] = ()
    """Settings that have changed for the first time in the last steps."""

    changed: tuple[str, ...] = ()
    """Weights that have changed between the step before and this one."""

    changed_before: tuple[int, tuple[str, ...]] | None = None
    """Step before which weights have changed in the last few steps, and their names."""

    states: tuple[StateNorm, ...] = ()
    """Weights, optimizer states and buffers whose norm is non-finite or has risen, worst first."""

    num_weights: int = 0
    """Number of weights that `states` was chosen from."""

    micro_losses: tuple[float, ...] = ()
    """Loss of each micro-batch as the network returned it; empty without a recorder."""

    outer_losses: tuple[float, ...] = ()
    """Loss of each micro-batch as the Trainer got it; empty in a loop or without a recorder."""

    terms: Mapping[str, float] = field(default_factory=dict)
    """Losses that were reported by name, such as the terms of the loss."""

    factors: tuple[float, ...] = ()
    """Gradient that the backward of each micro-batch passed to its loss; empty if unknown."""

    factor_change: float | None = None
    """Ratio of these gradients to those of the step before; ``None`` if unknown."""

    earlier_losses: tuple[tuple[float, float], ...] = ()
    """Loss of each micro-batch of the step before, then and with the present weights; empty if
    unknown."""

    own_losses: tuple[tuple[float, float], ...] = ()
    """Loss of each micro-batch of this step, in the step and with the present weights; empty if
    unknown."""

    program: ProgramChange | None = None
    """What an earlier call gives now; ``None`` if it is unknown."""

    difference: Difference | None = None
    """Where the step first differs from the step before; ``None`` if it is unknown."""

    search: RowSearch | None = None
    """Rows that stand out; ``None`` if they were not searched."""

    buffers: tuple[str, ...] = ()
    """Names of the buffers that have become non-finite since the previous bad step."""

    @property
    def weights(self) -> tuple[StateNorm, ...]:
        """Weights whose norm is non-finite or has risen, worst first; empty if most have.

        A change of most weights is a consequence of the fault, not its cause.
        """
        return () if self.has_moved else self.risen_weights

    @property
    def has_moved(self) -> bool:
        """Whether most weights are non-finite or have risen."""
        return len(self.risen_weights) > max(1, self.num_weights // 2)

    @property
    def risen_weights(self) -> tuple[StateNorm, ...]:
        """Weights whose norm is non-finite or has risen, worst first, even if most have."""
        return tuple(each for each in self.states if each.kind == "weight")

    @property
    def odd_weights(self) -> set[str]:
        """Names of all weights that have moved, risen or become non-finite."""
        return {*(each.name for each in self.risen_weights), *self.moved}

    @property
    def earlier_loss(self) -> tuple[float, float] | None:
        """Mean loss of the step before, then and with the present weights; ``None`` if unknown."""
        if not self.earlier_losses:
            return None
        then, again = (statistics.fmean(each) for each in zip(*self.earlier_losses, strict=True))
        return then, again

    @property
    def bad_groups(self) -> list[int]:
        """Indices of the groups whose norm is non-finite."""
        return [number for number, norm in enumerate(self.norms) if not math.isfinite(norm)]

    def group(self, number: int) -> GroupNorm:
        """Return the norm of a group."""
        return GroupNorm(
            name=self.names[number],
            rank=self.rank,
            norm=self.norms[number],
            usual_norm=self.usual_norms[number],
        )

    def is_judged(self, number: int) -> bool:
        """Return whether a group's norm has a score; it has none far below the global norm."""
        return number < len(self.scores) and not math.isnan(self.scores[number])

    def rise(self, number: int) -> float:
        """Return the ratio of a group's norm to its usual norm; 0 if the usual norm is unknown."""
        usual = self.usual_norms[number]
        return self.norms[number] / usual if usual > 0 else 0.0

    def has_higher_gradient(self, weight: str) -> bool:
        """Return whether the gradient of a weight has risen, also one that is too small to judge.

        ``False`` if the weight has no group of its own.
        """
        return weight in self.names and self.rise(self.names.index(weight)) > _HIGHER

    @property
    def has_fault(self) -> bool:
        """Whether this rank may be at fault: a loss or norm is non-finite, or norms are unknown."""
        return not math.isfinite(self.loss) or bool(self.bad_groups) or not self.norms


def is_explained_by_scale(evidence: Sequence[RankEvidence], limit: float) -> bool:
    """Tell whether gradients are non-finite only because the loss scale is too high.

    This is true if the losses of all ranks are finite, no weight has risen or become non-finite, no
    buffer has become non-finite, and the largest plausible gradient times the loss scale reaches
    `limit`.

    Args:
        evidence: Evidence of all ranks. One rank alone may have loaded a state. All ranks must
            decide alike, so they take loss scale and usual global norm of the first rank.
        limit: Largest finite number that a gradient can hold.
    """
    loss_scale, usual_global_norm = evidence[0].loss_scale, evidence[0].usual_global_norm
    if loss_scale is None or loss_scale <= 1:
        return False
    if any(not math.isfinite(each.loss) or each.weights or each.buffers for each in evidence):
        return False
    expected = [
        _largest_plausible(each, number, usual_global_norm)
        for each in evidence
        for number in each.bad_groups
    ]
    if not expected:
        expected = [_with_headroom(usual_global_norm)]
    if any(each.in_float16 for each in evidence):
        limit = min(limit, LARGEST_FLOAT16)
    return max(expected) * loss_scale >= limit


def is_scale_alone(
    evidence: Sequence[RankEvidence],
    unscaled_norms: Sequence[float | None],
    *,
    is_explained: bool,
) -> bool:
    """Tell whether the loss scale alone is at fault, by replays without it.

    They show it if the gradients were finite, and no larger than usual, on each rank at fault.

    Args:
        evidence: Evidence of all ranks.
        unscaled_norms: Norm of each rank's gradients without the loss scale, infinite if the scale
            is not at fault; ``None`` if unknown.
        is_explained: Whether the size of the loss scale explains the step, where no replay tells.
    """
    if any(not math.isfinite(each.loss) or each.weights or each.buffers for each in evidence):
        return False
    limit = _with_headroom(evidence[0].usual_global_norm)
    answers = [
        is_explained if norm is None else math.isfinite(norm) and norm <= limit
        for each, norm in zip(evidence, unscaled_norms, strict=True)
        if each.has_fault
    ]
    return all(answers) if answers else is_explained


def _largest_plausible(
    evidence: RankEvidence, number: int, usual_global_norm: float | None
) -> float:
    """Return the largest plausible gradient of a group in an ordinary step."""
    usual = evidence.usual_norms[number]
    if not math.isnan(usual):
        return _with_headroom(usual)
    finite = [norm for norm in evidence.norms if math.isfinite(norm) and norm > 0]
    return max(finite) * _SPREAD if finite else _with_headroom(usual_global_norm)


def _with_headroom(usual_norm: float | None) -> float:
    return math.inf if usual_norm is None else usual_norm * _HEADROOM


def number_or_none(value: float) -> float | None:
    """Return a number of a judge; ``None`` if it is NaN, which means unknown."""
    return None if math.isnan(value) else value
