"""Defer the steps of a torch schedule until the host knows whether the last update was applied.

A learning-rate schedule must not advance for an update that was skipped. But the loop calls
``scheduler.step()`` right after ``optimizer.step()``, when only the device knows whether the update
was skipped. Reading the flag there would synchronize with the device in every step. So the call is
split in two:

- ``scheduler.step()`` only records a request (`ScheduleRequest.now`): the arguments of the call and
  the learning rates at that moment.
- Just before the next update, the result of the last update has arrived on the host. ``resolve``
  then does the requested steps, or drops them if the last update was skipped. The next update uses
  the new rates, exactly as if the schedule had advanced at once.

Code that reads a schedule before ``resolve`` (``state_dict``, a log, a checkpoint) must flush
first. Code that reads ``optimizer.param_groups`` directly sees the rates that the last update used.

A maintainer must know three facts:

- A schedule computes new rates from the rates in ``param_groups``. So a requested step must start
  from the rates at the time of the request. If the loop has set a rate since then (lowered it by
  hand, for example), the loop's rate wins, as if the schedule had advanced at once (`advance`).
- `defer_schedule` changes the schedule's class in place, because the loop holds the same object.
  The subclass keeps the name and module of the class, so logs and errors show the user's schedule.
- Schedules put all their attributes into ``state_dict``. `DeferredSchedule.state_dict` removes the
  attribute ``deferral``, so that a checkpoint loads without mfwrap.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


class ScheduleRequest(NamedTuple):
    """A recorded call of a schedule's ``step``; the call is made later or dropped."""

    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    rates: list[Any]
    """Learning rates of all parameter groups at the time of the call."""

    @classmethod
    def now(
        cls, schedule: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]
    ) -> "ScheduleRequest":
        """Return a request that records the current learning rates."""
        return cls(arguments, keywords, [group["lr"] for group in _groups(schedule)])


def advance(
    schedule: Any, requests: Sequence[ScheduleRequest], step: Callable[[ScheduleRequest], None]
) -> None:
    """Do requested steps, with the same result as if the schedule had advanced at each request.

    The steps start from the learning rates at the time of the last request. A rate that the loop
    has set since then is kept.

    Args:
        schedule: Schedule that is stepped.
        requests: Requests in the order of the calls, at least one.
        step: Function that does one requested step.
    """
    groups = _groups(schedule)
    set_since = {}
    for index, (group, rate) in enumerate(zip(groups, requests[-1].rates, strict=False)):
        # Skip rates that are tensors. They change in place, so the request holds no earlier value
        # to restore, and comparing tensors would synchronize with the device.
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
    """Mixin that delays a schedule's steps; `defer_schedule` adds it to the schedule's class."""

    deferral: _Deferral

    def step(self, *args: Any, **keywords: Any) -> None:
        """Request a step. `resolve` does it later, or drops it if the last update was skipped."""
        self.deferral.requests.append(ScheduleRequest.now(self, args, keywords))

    def resolve(self) -> None:
        """Do the requested steps, or drop them if the last update was skipped.

        Synchronizes with the device.
        """
        requests, self.deferral.requests = self.deferral.requests, []
        if requests and not self.deferral.was_skipped():
            step = super().step  # type: ignore[misc]  # (of the user's schedule)
            advance(self, requests, lambda request: step(*request.arguments, **request.keywords))

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state after all updates so far. Synchronizes with the device."""
        self.deferral.flush()
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]  # (the user's schedule)
        # torch's state_dict returns all attributes, ours included.
        return {name: value for name, value in state.items() if name != "deferral"}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the schedule's state, and drop requested steps."""
        self.deferral.requests.clear()
        super().load_state_dict(state_dict)  # type: ignore[misc]  # (the user's schedule)


def defer_schedule(
    schedule: Any, was_skipped: Callable[[], bool], flush: Callable[[], None]
) -> DeferredSchedule:
    """Defer a schedule's steps until it is known whether the last update was applied; in place.

    Args:
        schedule: Schedule of torch. It is changed in place: its class is replaced by a subclass.
        was_skipped: Function that returns whether the last update was skipped; it may synchronize
            with the device.
        flush: Function that reads all pending results and then calls this schedule's
            `DeferredSchedule.resolve`.

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
    """Undo `defer_schedule`, and drop requested steps."""
    schedule.__class__ = type(schedule).__mro__[2]
    del schedule.deferral


def is_stepped_with_a_metric(schedule: Any) -> bool:
    """Return whether a schedule's ``step`` takes ``metrics``, as ``ReduceLROnPlateau`` does."""
    return "metrics" in inspect.signature(schedule.step).parameters
