"""Track the usual global norm of a run on the host, without a device."""

import math
from collections.abc import Mapping
from typing import Any, final

_DECAY = 0.98
_MOST_RISE = 4.0
"""Limit for the rise of a norm, as a factor. In a mean, a norm counts as at most this multiple of
the usual norm, so that one spike does not change the mean much."""

_FEWEST_STEPS = 20
_DEVIATIONS = 6.0


@final
class GlobalNormHistory:
    """Track the usual global norm and detect spikes.

    A norm is a spike if it is above `factor` times the usual norm and also more than six standard
    deviations above the usual norm. The usual norm and the deviation are computed from logarithms,
    because norms vary by factors. Spikes are detected only after the first twenty norms.

    Args:
        factor: Smallest ratio of a spike to the usual norm, > 1.
    """

    def __init__(self, factor: float) -> None:
        self._log_factor = math.log(factor)
        self._num_steps = 0
        self._mean = 0.0
        self._variance = 0.0

    @property
    def usual(self) -> float | None:
        """The usual norm: a running geometric mean, ``None`` before the first norm."""
        return math.exp(self._mean) if self._num_steps else None

    def is_spike(self, norm: float) -> bool:
        """Tell whether a finite norm is a spike."""
        if self._num_steps < _FEWEST_STEPS or norm <= 0:
            return False
        rise = math.log(norm) - self._mean
        return rise > max(self._log_factor, _DEVIATIONS * math.sqrt(self._variance))

    def add(self, norm: float) -> None:
        """Include the norm of an update in the usual norm; ignore a zero or non-finite norm."""
        if not math.isfinite(norm) or norm <= 0:
            return
        value = math.log(norm)
        if self._num_steps:
            deviation = math.sqrt(self._variance)
            value = min(value, self._mean + max(math.log(_MOST_RISE), 3 * deviation))
        self._num_steps += 1
        weight = max(1 - _DECAY, 1 / self._num_steps)
        difference = value - self._mean
        self._mean += weight * difference
        self._variance = (1 - weight) * (self._variance + weight * difference**2)

    def state_dict(self) -> dict[str, float]:
        """Return the state, ready for JSON."""
        return {
            "num_steps": self._num_steps,
            "mean_log": self._mean,
            "variance_log": self._variance,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        self._num_steps = int(state["num_steps"])
        self._mean = float(state["mean_log"])
        self._variance = float(state["variance_log"])
