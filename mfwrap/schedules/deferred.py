"""A torch schedule that advances only once it is known whether the last update was applied."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

__all__ = [
    "DeferredSchedule",
    "ScheduleRequest",
    "advance",
    "defer_schedule",
    "is_stepped_with_a_metric",
    "undefer_schedule",
]


class ScheduleRequest(NamedTuple):
    """A step that a schedule was asked for."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    rates: list[Any]
    """Of all parameter groups, when it was asked for."""

    @classmethod
    def now(
        cls, schedule: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> "ScheduleRequest":
        """Return a request with the rates as they are."""
        return cls(arguments, keywords, [group["lr"] for group in _groups(schedule)])


def advance(
    schedule: Any, requests: Sequence[ScheduleRequest], step: Callable[[ScheduleRequest], None]
) -> None:
    """Do the steps that were asked for, from the rates of then.

    A rate that somebody has set since stays, as if the steps had been done at once.

    Args:
        schedule: Whose rates they are.
        requests: In their order.
        step: Does one.
    """
    groups = _groups(schedule)
    set_since = {}
    for index, (group, rate) in enumerate(zip(groups, requests[-1].rates, strict=False)):
        # A rate that is a tensor is changed in place, and comparing it would wait.
        if not isinstance(group["lr"], Tensor) and group["lr"] != rate:
            set_since[index] = group["lr"]
            group["lr"] = rate
    for request in requests:
        step(request)
    for index, rate in set_since.items():
        groups[index]["lr"] = rate


def _groups(schedule: Any) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = getattr(getattr(schedule, "optimizer", None), "param_groups", [])
    return groups


@dataclass(slots=True)
class _Deferral:
    was_skipped: Callable[[], bool]
    flush: Callable[[], None]
    requests: list[ScheduleRequest] = field(default_factory=list)


class DeferredSchedule:
    """Mixed in before a schedule's own class by `defer_schedule`."""

    deferral: _Deferral

    def step(self, *args: Any, **keywords: Any) -> None:
        """Ask for a step, which is done unless the last update turns out to be skipped."""
        self.deferral.requests.append(ScheduleRequest.now(self, args, keywords))

    def resolve(self) -> None:
        """Do what was asked for, unless the last update was skipped; waits for it."""
        requests, self.deferral.requests = self.deferral.requests, []
        if requests and not self.deferral.was_skipped():
            step = super().step  # type: ignore[misc]
            advance(self, requests, lambda request: step(*request.arguments, **request.keywords))

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
