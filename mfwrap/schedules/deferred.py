"""Defer the steps of a torch schedule until the host knows whether the last update was applied.

A learning-rate schedule must not advance for an update that was skipped. But the loop calls
``scheduler.step()`` right after ``optimizer.step()``, when only the device may know whether the
update was skipped. Reading the flag there would synchronize with the device in every step. So a
step is deferred if, and only if, the host would have to wait for its decision:

- ``scheduler.step()`` only records a request (`ScheduleRequest.now`): the arguments of the call and
  the learning rates at that moment.
- Just before the next update, the result of the last update has arrived on the host. ``resolve``
  then does the requested steps, or drops them if the last update was skipped. The next update uses
  the new rates, exactly as if the schedule had advanced at once.
- Code that reads the schedule in between (``get_last_lr``, ``last_epoch``, ``state_dict``) resolves
  the requested steps first, and pays for it by synchronizing once. Code that reads
  ``optimizer.param_groups`` directly sees the rates that the last update used.

If the host knows the outcome (the parameters are on a CPU, the optimizer cannot skip on the device,
or no update is pending), ``scheduler.step()`` advances at once.

A maintainer must know four facts:

- A schedule computes new rates from the rates in ``param_groups``. So a requested step must start
  from the rates at the time of the request. If the loop has set a rate since then (lowered it by
  hand, for example), the loop's rate wins, as if the schedule had advanced at once (`advance`).
- `defer_schedule` changes the schedule's class in place, because the loop holds the same object.
  The subclass keeps the name and module of the class, so logs and errors show the user's schedule.
- Schedules put all their attributes into ``state_dict``. `DeferredSchedule.state_dict` removes the
  attribute ``deferral``, so that a checkpoint loads without mfwrap.
- torch's schedules read ``last_epoch`` while they step. `DeferredSchedule.resolve` therefore takes
  the requests off the list before it does the first of them.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from mfwrap.schedules.pickling import pickled_as


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
    is_known: Callable[[], bool]
    was_skipped: Callable[[], bool]
    requests: list[ScheduleRequest] = field(default_factory=list)


class DeferredSchedule:
    """Mixin that delays a schedule's steps; `defer_schedule` adds it to the schedule's class."""

    deferral: _Deferral

    def step(self, *args: Any, **keywords: Any) -> None:
        """Step at once if the host knows whether the last update was skipped; else request a step.

        If the last update was skipped, the step is dropped.
        """
        if not self.deferral.is_known():
            self.deferral.requests.append(ScheduleRequest.now(self, args, keywords))
            return
        self.resolve()
        if not self.deferral.was_skipped():
            super().step(*args, **keywords)  # type: ignore[misc]  # (of the user's schedule)

    def resolve(self) -> None:
        """Do the requested steps, or drop them if the last update was skipped.

        Synchronizes with the device if steps are requested and the host does not know the outcome.
        """
        requests, self.deferral.requests = self.deferral.requests, []
        if requests and not self.deferral.was_skipped():
            step = super().step  # type: ignore[misc]  # (of the user's schedule)
            advance(self, requests, lambda request: step(*request.arguments, **request.keywords))

    @property
    def last_epoch(self) -> int:
        """Number of steps done. Resolves requested steps, as `resolve` does."""
        self.resolve()
        # torch's schedules store `last_epoch` in the instance, where this property hides it.
        if "last_epoch" not in vars(self):
            msg = f"{type(self).__name__} has no attribute 'last_epoch'"
            raise AttributeError(msg)
        epoch: int = vars(self)["last_epoch"]
        return epoch

    @last_epoch.setter
    def last_epoch(self, value: int) -> None:
        vars(self)["last_epoch"] = value

    def get_last_lr(self) -> list[Any]:
        """Return the rates of the next update. Resolves requested steps, as `resolve` does."""
        self.resolve()
        rates: list[Any] = super().get_last_lr()  # type: ignore[misc]  # (of the user's schedule)
        return rates

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state after all updates so far. Resolves requested steps."""
        self.resolve()
        state: dict[str, Any] = super().state_dict()  # type: ignore[misc]  # (the user's schedule)
        # torch's state_dict returns all attributes, ours included.
        return {name: value for name, value in state.items() if name != "deferral"}

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A copy is the user's own schedule, with nothing pending, as after `undefer_schedule`.
        self.resolve()
        return pickled_as(type(self).__mro__[2], self, without=("deferral",))

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the schedule's state, and drop requested steps."""
        self.deferral.requests.clear()
        super().load_state_dict(state_dict)  # type: ignore[misc]  # (the user's schedule)


def defer_schedule(
    schedule: Any, is_known: Callable[[], bool], was_skipped: Callable[[], bool]
) -> DeferredSchedule:
    """Defer a schedule's steps until it is known whether the last update was applied; in place.

    Call `DeferredSchedule.resolve` just before each update.

    Args:
        schedule: Schedule of torch. It is changed in place: its class is replaced by a subclass.
        is_known: Function that returns whether `was_skipped` returns without synchronizing with
            the device.
        was_skipped: Function that returns whether the last update was skipped; False before the
            first update.

    Returns:
        `schedule`.
    """
    kind = type(schedule)
    namespace: dict[str, Any] = {"__module__": kind.__module__}
    if hasattr(kind, "last_epoch"):
        # The user's class computes it.
        namespace["last_epoch"] = inspect.getattr_static(kind, "last_epoch")
    schedule.__class__ = type(kind.__name__, (DeferredSchedule, kind), namespace)
    schedule.deferral = _Deferral(is_known, was_skipped)
    deferred: DeferredSchedule = schedule
    return deferred


def undefer_schedule(schedule: Any) -> None:
    """Undo `defer_schedule`, and drop requested steps."""
    schedule.__class__ = type(schedule).__mro__[2]
    del schedule.deferral


def is_stepped_with_a_metric(schedule: Any) -> bool:
    """Return whether a schedule's ``step`` takes ``metrics``, as ``ReduceLROnPlateau`` does."""
    return "metrics" in inspect.signature(schedule.step).parameters
