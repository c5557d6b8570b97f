"""Tell from the scores of a step what kind of anomaly it is."""

import math
from collections import deque
from collections.abc import Mapping
from typing import Any, final

from mfwrap.callbacks.culprit.judges import Scores
from mfwrap.callbacks.culprit.rate_causes import LARGE_RATIO, RATE_RISE
from mfwrap.callbacks.culprit.state_judge import LIMIT as STATE_LIMIT
from mfwrap.callbacks.culprit.step_judge import LIMITS, StepScores
from mfwrap.callbacks.culprit.update_growth import Growth, UpdateGrowth
from mfwrap.callbacks.shared.step_values import StepNumbers

SHARED_KINDS = frozenset({"spike", "learning_rate_spike"})
"""Kinds of anomalies, beside overflows, that all ranks find together."""

_FEWEST_STEPS = 5
"""Number of steps before a rise of the learning rate counts as an anomaly by itself: a warm-up may
begin with a rate of almost zero."""

_FEW_UPDATES = 2
"""Number of updates in a row that must be too large together, wherever their size comes from."""


@final
class StepKinds:
    """Choose the kind of each step with finite gradients, and follow what it needs from the last.

    Args:
        spike_factor: Smallest ratio of a spike of the global norm to what is usual.
    """

    def __init__(self, spike_factor: float) -> None:
        self.growth: Growth | None = None
        """Growth of the updates in the last steps; ``None`` if they have not grown."""
        self._spike_factor = spike_factor
        self._num_steps = 0
        self._ratios: deque[float] = deque(maxlen=_FEW_UPDATES)
        self._updates = UpdateGrowth()

    def follow(self, scores: StepScores, *, applied: bool) -> None:
        """Include a step. Call this once for each step, before `spike` and `own`."""
        self._num_steps += applied
        self._ratios.append(scores.update_ratio)
        if applied:
            self.growth = self._updates.add(scores.update_ratio, scores.learning_rate)

    def is_spike(self, numbers: StepNumbers, scores: Scores) -> bool:
        """Tell whether the global norm is a spike, which all ranks find together."""
        norm, step = numbers.global_norm, scores.step
        if norm is None or not step.global_norm > LIMITS["global_norm"]:
            return False
        return norm > self._spike_factor * step.usual_global_norm

    def own(self, scores: Scores) -> str | None:
        """Return the kind of an anomaly that all ranks need not share, or do share by nature.

        Early warnings come last, because what they warn of may be in the same step.
        """
        step, state, forward = scores
        is_rate = RATE_RISE <= step.rate_rise < math.inf and self._num_steps > _FEWEST_STEPS
        has_changed = step.num_changed > 0 or state.highest > STATE_LIMIT or state.num_bad > 0
        kinds = {
            "learning_rate_spike": is_rate,
            "state_spike": has_changed,
            "loss_spike": step.loss > LIMITS["loss"],
            "local_norm_spike": step.num_risen > 0,
            "update_spike": step.num_moved > 0 or self._moves_too_far(),
            "zero_gradient": step.num_dead > 0,
            "attention_logits": forward.num_logits > 0,
            "expert_load": forward.num_loads > 0,
            "update_growth": self.growth is not None,
        }
        return next((kind for kind, is_found in kinds.items() if is_found), None)

    def _moves_too_far(self) -> bool:
        """Tell whether the last updates were as large as the weights, from the first step on."""
        # The first update of a rate that is far too high makes weights that the next ones no longer
        # change as much. So the geometric mean decides.
        is_known = len(self._ratios) == _FEW_UPDATES
        return is_known and math.prod(self._ratios) > LARGE_RATIO**_FEW_UPDATES

    def state_dict(self) -> dict[str, Any]:
        """Return what later steps need, ready for JSON."""
        return {"num_steps": self._num_steps, "updates": self._updates.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self._num_steps = state["num_steps"]
        self._updates.load_state_dict(state["updates"])
