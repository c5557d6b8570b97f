"""Follow the learning rate, to tell a rise that no warm-up explains, on the host."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, final

LEAST_RISE = 5.0
"""Smallest ratio of a learning rate to all rates before the rise that is an anomaly."""

_FEWEST_UPDATES = 5
"""Number of applied updates before a rise is an anomaly: a warm-up may begin with a rate of almost
zero."""

_WARM_UP, _SPAN = 16, 8
"""Number of updates after which a rise that began with the first one is judged, and the number of
its last updates in which it must not be fivefold."""


class RateRise(NamedTuple):
    """A learning rate that is far above all rates before it."""

    before: float
    """Highest rate before the rise."""

    now: float
    num_steps: int
    """Number of steps in a row in which the rate has risen; 1 for a jump."""

    @property
    def ratio(self) -> float:
        """Ratio of the rate now to the highest one before the rise."""
        return self.now / self.before


@final
class RateCourse:
    """Find a jump of the learning rate, or a rise over several steps after one without a rise.

    A warm-up rises from the first step on: it is found only if a rate is five times that of eight
    updates before, from the 16th update on. A schedule with restarts returns to a rate that it has
    had, which is not found.
    """

    def __init__(self) -> None:
        self._num_updates = 0
        self._recent: list[float] = []
        self._last: float | None = None
        self._highest = self._before_rise = 0.0
        self._rising = 0

    def add(self, rate: float, ordinary: float, *, applied: bool) -> RateRise | None:
        """Include the rate of a step, and return the rise if it is an anomaly.

        Args:
            rate: Largest learning rate of the step; NaN is ignored.
            ordinary: The rate that the schedule has for the step, which a rollback may lower.
            applied: Whether the update was applied. Otherwise the rate is not included.
        """
        if math.isnan(rate):
            return None
        is_rise = self._last is not None and ordinary > self._last
        rising = self._rising + 1 if is_rise else 0
        before = self._highest
        if rising > 1 and self._before_rise > 0:
            before = self._before_rise
        elif rising >= _WARM_UP:
            before = self._recent[0]
        found = None
        if self._num_updates >= _FEWEST_UPDATES and 0 < LEAST_RISE * before <= rate:
            is_jump = rate >= LEAST_RISE * self._highest
            num_steps = rising if self._before_rise > 0 else _SPAN
            found = RateRise(before, rate, 1 if is_jump else num_steps)
        if applied:
            if rising == 1:
                # A rise from the very first rate on is a warm-up.
                self._before_rise = self._highest if self._num_updates > 1 else 0.0
            self._num_updates += 1
            self._last, self._rising = ordinary, rising
            self._recent = [*self._recent, ordinary][-_SPAN:]
            self._highest = max(ordinary, self._highest)
        return found

    def state_dict(self) -> dict[str, Any]:
        """Return the course, ready for JSON."""
        names = ("num_updates", "last", "highest", "before_rise", "rising", "recent")
        return {name: getattr(self, f"_{name}") for name in names}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state that `state_dict` returned."""
        for name, value in state.items():
            setattr(self, f"_{name}", value)
