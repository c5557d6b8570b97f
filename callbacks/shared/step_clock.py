"""How long steps take."""

from collections.abc import Callable
from typing import final

__all__ = ["StepClock"]

_DECAY = 0.9


@final
class StepClock:
    """Time of steps, without what the loop does between them.

    A step's time is that from the last `restart` to `end_step`, which restarts too.

    Args:
        clock: Returns seconds from an arbitrary start.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._start: float | None = None
        self._lap_seconds = 0.0
        self._lap_steps = 0
        self._first_seconds: float | None = None
        self._smoothed = 0.0
        self._weight = 0.0

    def restart(self) -> None:
        """Leave out the time since the last step."""
        self._start = self._clock()

    def end_step(self) -> None:
        """Count the time since the last restart, if there was one, as a step's."""
        start, self._start = self._start, self._clock()
        if start is None:
            return
        seconds = max(self._start - start, 0.0)
        self._lap_seconds += seconds
        self._lap_steps += 1
        if self._first_seconds is None:
            self._first_seconds = seconds
        else:
            self._smoothed = _DECAY * self._smoothed + (1 - _DECAY) * seconds
            self._weight = _DECAY * self._weight + (1 - _DECAY)

    def end_lap(self) -> float:
        """Return the mean time of the steps since the last call, in seconds; 0 if none."""
        seconds = self._lap_seconds / self._lap_steps if self._lap_steps else 0.0
        self._lap_seconds, self._lap_steps = 0.0, 0
        return seconds

    @property
    def typical_seconds(self) -> float:
        """Exponential mean of the steps' times, bias-corrected, in seconds.

        The first step warms up and is left out as soon as there is another; 0 without any.
        """
        if self._weight:
            return self._smoothed / self._weight
        return self._first_seconds or 0.0
