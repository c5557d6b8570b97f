"""A torch schedule that advances only once it is known whether the last update was applied."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["DeferredSchedule", "defer_schedule", "is_stepped_with_a_metric", "undefer_schedule"]


@dataclass(slots=True)
class _Deferral:
    was_skipped: Callable[[], bool]
    flush: Callable[[], None]
    requests: list[tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


class DeferredSchedule:
    """Mixed in before a schedule's own class by `defer_schedule`."""

    deferral: _Deferral

    def step(self, *args: Any, **keywords: Any) -> None:
        """Ask for a step, which is done unless the last update turns out to be skipped."""
        self.deferral.requests.append((args, keywords))

    def resolve(self) -> None:
        """Do what was asked for, unless the last update was skipped; waits for it."""
        requests = self.deferral.requests
        while requests:
            args, keywords = requests.pop(0)
            if not self.deferral.was_skipped():
                super().step(*args, **keywords)  # type: ignore[misc]

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state after all updates so far; waits for the last one."""
        self.deferral.flush()
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]
        # torch saves whatever attributes there are.
        return {name: value for name, value in state.items() if name != "deferral"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the schedule; what was asked for is dropped."""
        self.deferral.requests.clear()
        super().load_state_dict(state_dict)  # type: ignore[misc]


def defer_schedule(
    schedule: Any, was_skipped: Callable[[], bool], flush: Callable[[], None]
) -> DeferredSchedule:
    """Make a schedule of torch wait with its steps, in place.

    Args:
        schedule: Keeps its identity and gets a subclass of its class.
        was_skipped: Returns whether the last update was skipped; may wait.
        flush: Resolves all that is pending, `DeferredSchedule.resolve` of this one included.

    Returns:
        `schedule`.
    """
    kind = type(schedule)
    schedule.__class__ = type(
        kind.__name__, (DeferredSchedule, kind), {"__module__": kind.__module__}
    )
    schedule.deferral = _Deferral(was_skipped, flush)
    deferred: DeferredSchedule = schedule
    return deferred


def undefer_schedule(schedule: Any) -> None:
    """Undo `defer_schedule`; what was asked for is dropped."""
    schedule.__class__ = type(schedule).__mro__[2]
    del schedule.deferral


def is_stepped_with_a_metric(schedule: Any) -> bool:
    """Return whether a schedule's ``step`` takes ``metrics``, as ``ReduceLROnPlateau`` does."""
    return "metrics" in inspect.signature(schedule.step).parameters
