"""Subclass of accelerate's scheduler that advances only for applied updates.

accelerate's scheduler asks whether the update before it was skipped. If only the device knows,
asking would synchronize, so `AttachedScheduler` records a request instead; see
`mfwrap.schedules.deferred`.
"""

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from accelerate.scheduler import AcceleratedScheduler

from mfwrap.accelerate.attachment import Attachment
from mfwrap.accelerate.attributes import replaced
from mfwrap.compatibility.accelerate import schedulers_of
from mfwrap.compatibility.torch import step_count
from mfwrap.schedules.deferred import ScheduleRequest, advance, is_stepped_with_a_metric
from mfwrap.schedules.pickling import pickled_as


class Continued(NamedTuple):
    """How a schedule continues after a resume."""

    steps_per_update: int | None = None
    """As `AttachedScheduler.steps_per_update`."""

    position: int | None = None
    """Position to continue from; ``None`` for that of the checkpoint."""

    keywords: Sequence[Mapping[str, Any]] = ()
    """Keywords of the checkpoint, such as ``num_training_steps``, for each function of a LambdaLR;
    empty to keep those of the loop."""


class AttachedScheduler(AcceleratedScheduler):  # type: ignore[misc]  # (accelerate is untyped)
    """Wrap a schedule as accelerate does; do not wait for the device in order to advance it.

    If the host knows whether the last update was applied, the schedule advances at once, as with
    accelerate. Otherwise it advances just before the next update: by then the host can learn the
    outcome without stopping the device. A schedule that is stepped with a metric
    (``ReduceLROnPlateau``) always advances at once, which synchronizes with the device.
    """

    attachment: Attachment
    requests: list[ScheduleRequest]
    gradient_state: Any
    split_batches: bool

    steps_per_update: int | None
    """Number of the schedule's steps per update; ``None`` for accelerate's: one for each process,
    or one with ``split_batches``."""

    @property
    def scheduler(self) -> Any:
        """Schedule of torch. Does the requested steps first, which may synchronize.

        accelerate's ``get_last_lr``, ``state_dict`` and so on read this attribute.
        """
        self.resolve()
        return self.__dict__["scheduler"]

    @scheduler.setter
    def scheduler(self, scheduler: Any) -> None:
        self.__dict__["scheduler"] = scheduler

    def step(self, *args: Any, **keywords: Any) -> None:
        """Step, or request a step that `resolve` does later, if the last update was applied."""
        schedule = self.__dict__["scheduler"]
        follows_update = self.step_with_optimizer and self.gradient_state.sync_gradients
        waits = not all(
            # An optimizer of another accelerator is not attached: accelerate knows its outcome.
            getattr(optimizer, "outcome_is_known", True)
            for optimizer in self.optimizers
        )
        if follows_update and waits and self._may_wait():
            self.requests.append(ScheduleRequest.now(schedule, args, keywords))
            return
        if follows_update:
            self.attachment.step.resolve_schedules()
        # Between micro-batches accelerate only counts the call, but it reads `scheduler` to do so.
        # Hide the requests from that read, which would carry them out and wait for the device.
        requests, self.requests = self.requests, []
        try:
            self._step(*args, **keywords)
        finally:
            self.requests = requests

    def _step(self, *args: Any, **keywords: Any) -> None:
        """Step as accelerate does, but `steps_per_update` times per update."""
        follows_update = self.step_with_optimizer and self.gradient_state.sync_gradients
        if self.steps_per_update is None or not follows_update:
            super().step(*args, **keywords)
            return
        schedule = self.__dict__["scheduler"]
        with replaced(self, split_batches=True):  # one step per call
            for _ in range(self.steps_per_update):
                # Like accelerate, do not step a OneCycleLR beyond its end, which would raise.
                total_steps = getattr(schedule, "total_steps", None)
                if total_steps is None or step_count(schedule) <= total_steps:
                    super().step(*args, **keywords)

    def _may_wait(self) -> bool:
        """Return whether a step may be done later.

        It may not if the schedule is stepped with a metric, or if another schedule of the same
        optimizer has requested steps: each schedule computes its rates from those that the other
        one has set, so the other steps must be done before this request notes the rates.
        """
        schedule = self.__dict__["scheduler"]
        return not is_stepped_with_a_metric(schedule) and not any(
            each is not self
            and isinstance(each, AttachedScheduler)
            and bool(each.requests)
            and each.__dict__["scheduler"].optimizer is schedule.optimizer
            for each in schedulers_of(self.attachment.accelerator)
        )

    def resolve(self) -> None:
        """Do the requested steps if the last update was applied; drop them if it was skipped."""
        requests, self.requests = self.requests, []
        if not requests:
            return
        # accelerate ignores a schedule's step between two micro-batches of an update. The loop
        # requested these steps after the last micro-batch, but the first micro-batch of the next
        # update may have begun since. So show accelerate the state after the last micro-batch.
        with replaced(self, gradient_state=SimpleNamespace(sync_gradients=True)):
            advance(
                self.__dict__["scheduler"],
                requests,
                lambda request: self._step(*request.arguments, **request.keywords),
            )

    def resume(self, continued: Continued) -> None:
        """Continue the schedule of a checkpoint, whose state has been loaded."""
        self.steps_per_update = continued.steps_per_update
        if continued.position is not None:
            self.scheduler.last_epoch = continued.position
        functions = getattr(self.scheduler, "lr_lambdas", ())
        for function, keywords in zip(functions, continued.keywords, strict=False):
            function.keywords.update(keywords)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A copy is accelerate's own scheduler, with nothing pending, as after `detach`.
        self.resolve()
        return pickled_as(
            AcceleratedScheduler, self, without=("attachment", "requests", "steps_per_update")
        )

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the schedule, and drop the requested steps."""
        self.requests.clear()
        super().load_state_dict(state_dict)


def attach_scheduler(scheduler: Any, attachment: Attachment) -> None:
    """Make an `AttachedScheduler` of accelerate's scheduler, in place; ignore other objects."""
    if type(scheduler) is AcceleratedScheduler:
        scheduler.__class__ = AttachedScheduler
        scheduler.attachment = attachment
        scheduler.requests = []
        scheduler.steps_per_update = None
        attachment.step.add_schedule(scheduler)


def restore_scheduler(scheduler: Any) -> None:
    """Restore an `AttachedScheduler` to accelerate's own class, in place; ignore other objects."""
    if isinstance(scheduler, AttachedScheduler):
        scheduler.__class__ = AcceleratedScheduler
        del scheduler.attachment
        del scheduler.requests
        del scheduler.steps_per_update
