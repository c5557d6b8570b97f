"""What each rank knows of a step that went wrong, and what all of it says together."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from mfwrap.callbacks.culprit.anomaly_log import GroupNorm, WeightNorm

__all__ = ["RankEvidence", "is_explained_by_scale"]

_HEADROOM = 64.0
"""Gradients within a group, and of activations, may exceed the group's usual norm by as much."""

_SPREAD = 1e4
"""Norms of groups of one step may differ by as much."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankEvidence:
    """What one rank knows of a step."""

    rank: int
    loss: float
    names: tuple[str, ...]
    """Of the groups of local norms; empty if they are not known."""

    norms: tuple[float, ...]
    usual_norms: tuple[float, ...]
    """Before the step; nan where none is known."""

    weights: tuple[WeightNorm, ...]
    """Those that are not what they were."""

    @property
    def bad_groups(self) -> list[int]:
        """Numbers of the groups whose norm is not finite."""
        return [number for number, norm in enumerate(self.norms) if not math.isfinite(norm)]

    def group(self, number: int) -> GroupNorm:
        """Return the norm of a group."""
        return GroupNorm(
            name=self.names[number],
            rank=self.rank,
            norm=self.norms[number],
            usual_norm=self.usual_norms[number],
        )

    def rise(self, number: int) -> float:
        """Return how many times its usual norm a group has; 0 if that is not known."""
        usual = self.usual_norms[number]
        return self.norms[number] / usual if usual > 0 else 0.0

    @property
    def has_fault(self) -> bool:
        """Whether something here is not finite, or nothing is known of gradients."""
        return not math.isfinite(self.loss) or bool(self.bad_groups) or not self.norms


def is_explained_by_scale(
    evidence: Sequence[RankEvidence],
    loss_scale: float | None,
    usual_global_norm: float | None,
    limit: float,
) -> bool:
    """Tell whether it is for the loss scale alone that gradients are not finite.

    So it is if losses and weights are finite, and gradients of the usual size come near what their
    type can hold when they are multiplied by the scale.

    Args:
        evidence: Of all ranks.
        loss_scale: Of the step; ``None`` for 1.
        usual_global_norm: ``None`` if it is not known.
        limit: The largest gradient that is finite.
    """
    if loss_scale is None or loss_scale <= 1:
        return False
    if any(not math.isfinite(each.loss) or each.weights for each in evidence):
        return False
    expected = [
        _expected(each, number, usual_global_norm)
        for each in evidence
        for number in each.bad_groups
    ]
    if not expected:
        expected = [math.inf if usual_global_norm is None else usual_global_norm * _HEADROOM]
    return max(expected) * loss_scale >= limit


def _expected(evidence: RankEvidence, number: int, usual_global_norm: float | None) -> float:
    """Return how large a gradient of a group may be in an ordinary step."""
    usual = evidence.usual_norms[number]
    if not math.isnan(usual):
        return usual * _HEADROOM
    finite = [norm for norm in evidence.norms if math.isfinite(norm) and norm > 0]
    if finite:
        return max(finite) * _SPREAD
    return math.inf if usual_global_norm is None else usual_global_norm * _HEADROOM
