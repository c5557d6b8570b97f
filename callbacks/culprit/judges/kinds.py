"""Tell from the scores of a step what kind of anomaly it is."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, final

from mfwrap.callbacks.culprit.anomaly_log import Kind
from mfwrap.callbacks.culprit.causes.rate import LARGE_RATIO, ROW_RATIO
from mfwrap.callbacks.culprit.judges.course import (
    LOSS_LIMIT,
    CourseKind,
    LossCourse,
    NormCourse,
    Shift,
)
from mfwrap.callbacks.culprit.judges.growth import Growth, UpdateGrowth
from mfwrap.callbacks.culprit.judges.rates import RateCourse, RateRise
from mfwrap.callbacks.culprit.judges.state import LIMIT as STATE_LIMIT
from mfwrap.callbacks.culprit.judges.step import (
    EARLY_FACTOR,
    FEWEST_NORMS,
    LIMITS,
    StepScores,
)
from mfwrap.callbacks.shared.step_values import StepNumbers

_FALL = 100.0
"""Smallest ratio of the usual global norm to that of a vanishing gradient."""

_QUIET_STEPS = 50
"""Number of steps after a vanishing gradient in which another one is no anomaly. Batches from which
nothing is to be learned may be ordinary, as in reinforcement learning."""

_FEW_UPDATES = 2
"""Number of updates in a row that must be too large together, wherever their size comes from."""


@final
class StepKinds:
    """Choose the kind of each step with finite gradients, and follow what it needs from the last.

    Args:
        spike_factor: Smallest ratio of a spike of the global norm to what is usual.
        course: Course of this rank's loss, to which `follow` adds.
    """

    def __init__(self, spike_factor: float, course: LossCourse) -> None:
        self.growth: Growth | None = None
        """Growth of the updates in the last steps; ``None`` if they have not grown."""
        self.rate_rise: RateRise | None = None
        """Rise of the learning rate in the last step; ``None`` if it is ordinary."""
        self._spike_factor = spike_factor
        self._rates = RateCourse()
        self._ratios: deque[float] = deque(maxlen=_FEW_UPDATES)
        self.num_large = 0
        """Number of updates in a row that are too large together if there are more of them."""
        self._updates = UpdateGrowth()
        self._since_fall = _QUIET_STEPS
        self._course, self._norms = course, NormCourse()
        self._of_norm: Shift | None = None
        self._is_ruined = False
        self._of_course: CourseKind | None = None

    def follow(self, numbers: StepNumbers, scores: StepScores, *, applied: bool) -> None:
        """Include a step. Call this once for each step, before `shared` and `own`."""
        norm = numbers.global_norm
        self._of_norm = self._norms.add(norm, counts=applied)
        self._of_course = self._course.add(
            numbers.loss,
            norm_score=self._norms.score,
            update=(scores.update_ratio, scores.learning_rate),
            counts=applied,
        )
        # The step has told nobody that its update was to be skipped.
        self._is_ruined = norm is not None and not math.isfinite(norm)
        self.rate_rise = self._rates.add(
            scores.learning_rate, scores.ordinary_rate, applied=applied
        )
        self._ratios.append(scores.update_ratio)
        if applied:
            is_large = ROW_RATIO <= scores.update_ratio < math.inf
            self.num_large = self.num_large + 1 if is_large else 0
            self.growth = self._updates.add(scores.update_ratio, scores.learning_rate)

    def shared(self, numbers: StepNumbers, scores: StepScores) -> Kind | None:
        """Return the kind of an anomaly that all ranks find together, if their states are equal.

        It depends on the global norms of this step and the steps before. They are the same on all
        ranks, unless one rank alone has loaded a state. Call this once for each step.
        """
        norm, usual, score = numbers.global_norm, scores.usual_global_norm, scores.global_norm
        self._since_fall += 1
        # A norm of zero has no score. With a loss of zero, as is usual for this run, there was
        # nothing to learn.
        is_empty = norm == 0 == numbers.loss and not self._course.score < -LOSS_LIMIT
        is_early = self._norms.num_distances < FEWEST_NORMS
        # The first loss and its gradients may be of another size than all later ones.
        has_fallen = norm is not None and norm < usual / _FALL and not (is_early and norm > 0)
        if has_fallen and not is_empty and not score >= -LIMITS["global_norm"]:
            is_first, self._since_fall = self._since_fall > _QUIET_STEPS, 0
            if is_first:
                return "vanishing_gradient"
        factor = self._spike_factor
        if is_early:
            factor = max(factor, EARLY_FACTOR)
        is_high = norm is not None and norm > factor * usual
        if is_high and (score > LIMITS["global_norm"] or self._norms.is_far_beyond):
            return "spike"
        return None

    def own(self, scores: StepScores) -> list[Kind]:
        """Return the kinds of anomalies that other ranks may not have found.

        Early warnings come last, because what they warn of may be in the same step.
        """
        has_changed = scores.highest_state > STATE_LIMIT or scores.num_bad_states > 0
        kinds: dict[Kind, bool] = {
            "gradient_not_finite": self._is_ruined,
            # Each rank has a schedule of its own.
            "learning_rate_spike": self.rate_rise is not None or scores.lowest_rate < 0,
            "state_spike": has_changed,
            "loss_spike": self._of_course == "loss_spike",
            "loss_drop": self._of_course == "loss_drop",
            "local_norm_spike": scores.num_risen > 0,
            "update_spike": scores.num_moved > 0 or self._moves_too_far(),
            "zero_gradient": scores.num_dead > 0,
            "local_norm_drop": scores.num_fallen > 0,
            "loss_shift": self._of_course == "loss_shift",
            "norm_shift": self._of_norm is not None,
            "attention_logits": scores.num_logits > 0,
            "expert_load": scores.num_loads > 0,
            "update_growth": self.growth is not None,
        }
        return [kind for kind, is_found in kinds.items() if is_found]

    def forget(self) -> None:
        """Forget how far the norm of the last step was from the usual one."""
        self._norms.forget()

    def shift(self, kind: Kind) -> Shift | None:
        """Return the shift that is an anomaly of this kind; ``None`` for other kinds."""
        if kind == "norm_shift":
            return self._of_norm
        return self._course.shift if kind == "loss_shift" else None

    def _moves_too_far(self) -> bool:
        """Tell whether the last updates were as large as the weights, from the first step on."""
        # The first update of a rate that is far too high makes weights that the next ones no longer
        # change as much. So the geometric mean decides.
        is_known = len(self._ratios) == _FEW_UPDATES
        return is_known and math.prod(self._ratios) > LARGE_RATIO**_FEW_UPDATES

    def state_dict(self) -> dict[str, Any]:
        """Return what later steps need, ready for JSON."""
        return {
            "rates": self._rates.state_dict(),
            "updates": self._updates.state_dict(),
            "norms": self._norms.state_dict(),
            "since_fall": self._since_fall,
            "num_large": self.num_large,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        if "rates" in state:  # missing in checkpoints of 0.1.0
            self._rates.load_state_dict(state["rates"])
            self._norms.load_state_dict(state["norms"])
        self._updates.load_state_dict(state["updates"])
        self._since_fall = state["since_fall"]
        self.num_large = state.get("num_large", 0)  # missing in checkpoints of 0.1.0
