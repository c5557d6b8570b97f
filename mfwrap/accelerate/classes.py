"""accelerate's own classes with the step behind them.

Objects are moved into these classes and back by their ``__class__``, because whoever holds an
accelerator, an optimizer or a schedule keeps holding the same object.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.accelerate.loop_step import LoopStep
from mfwrap.arguments import described
from mfwrap.loss_scale.cells import DynamicLossScaleUpdateCell
from mfwrap.schedules.deferred import ScheduleRequest, advance, is_stepped_with_a_metric
from mfwrap.tensors.wrappers import unwrapped_optimizer

__all__ = [
    "AttachedAccelerator",
    "AttachedOptimizer",
    "AttachedScheduler",
    "Attachment",
    "StepScaler",
    "attached_class",
    "restore_optimizer",
    "restore_scheduler",
]


class Attachment(Protocol):
    """What an accelerator in `AttachedAccelerator` is attached to."""

    step: LoopStep

    answers_late: bool
    """Whether ``step_was_skipped`` says False instead of waiting."""

    is_loading: bool
    """Whether states of optimizers are being loaded."""

    def see_model(self, prepared: nn.Module) -> None:
        """Learn of a model in what accelerate has put around it."""

    def build(self, *, final: bool = False) -> None:
        """Add what has been prepared to the step; `final` if nothing more will come."""

    def flush(self) -> None:
        """Wait for what is pending of the last update, and advance schedules."""

    def clear(self) -> None:
        """Forget what has been prepared."""

    def saving(self, save: Callable[[], Any]) -> Any:
        """Call accelerate's own ``save_state``."""

    def loading(self, load: Callable[[], Any]) -> Any:
        """Call accelerate's own ``load_state``."""


class AttachedAccelerator:
    """Mixed in before an accelerator's own class by `attached_class`."""

    attachment: Attachment
    scaler: Any
    _optimizers: list[Any]

    def prepare(self, *args: Any, **keywords: Any) -> Any:
        """Prepare as accelerate does, and let the step know of it."""
        prepared = super().prepare(*args, **keywords)  # type: ignore[misc]
        self.attachment.build()
        return prepared

    def prepare_model(self, *args: Any, **keywords: Any) -> Any:
        """Prepare a model as accelerate does, whose own list has it without what is around it."""
        prepared = super().prepare_model(*args, **keywords)  # type: ignore[misc]
        self.attachment.see_model(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:  # noqa: FBT001  (accelerate's signature)
        """Prepare an optimizer whose ``step`` is the whole update."""
        prepared = super().prepare_optimizer(optimizer, device_placement)  # type: ignore[misc]
        if type(prepared) is AcceleratedOptimizer:
            prepared.__class__ = AttachedOptimizer
            prepared.attachment = self.attachment
            # One that was prepared before comes back as it was, with another scaler, or none.
            prepared.scaler = self.scaler
            if not any(each is prepared for each in self._optimizers):
                self._optimizers.append(prepared)
        elif not isinstance(prepared, AttachedOptimizer):
            msg = f"`optimizer` must be one that accelerate wraps, got {described(prepared)}"
            raise TypeError(msg)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a schedule that counts applied updates only."""
        prepared = super().prepare_scheduler(scheduler)  # type: ignore[misc]
        if type(prepared) is AcceleratedScheduler:
            prepared.__class__ = AttachedScheduler
            prepared.attachment = self.attachment
            prepared.requests = []
            self.attachment.step.schedules.append(prepared)
        return prepared

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Return the norm of the unscaled gradients before clipping; the step clips them."""
        self.attachment.build(final=True)
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        return self.attachment.step.clip_grad_norm(given, max_norm, float(norm_type))

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp the unscaled gradients, in place."""
        self.attachment.build(final=True)
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        self.attachment.step.clip_grad_value(given, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale, in place, in any precision."""
        self.attachment.build(final=True)
        if optimizer is not None and not isinstance(optimizer, (tuple, list)):
            optimizer = [optimizer]
        inner = None if optimizer is None else [unwrapped_optimizer(each) for each in optimizer]
        self.attachment.step.unscale(inner)

    def save_state(self, *args: Any, **keywords: Any) -> Any:
        """Save as accelerate does; what the step keeps lies beside it."""
        save = super().save_state  # type: ignore[misc]
        return self.attachment.saving(lambda: save(*args, **keywords))

    def load_state(self, *args: Any, **keywords: Any) -> Any:
        """Load as accelerate does, and what the step keeps."""
        load = super().load_state  # type: ignore[misc]
        self.attachment.build(final=True)
        return self.attachment.loading(lambda: load(*args, **keywords))

    def free_memory(self, *objects: Any) -> Any:
        """Forget all that has been prepared."""
        try:
            self.attachment.clear()
        finally:
            freed = super().free_memory(*objects)  # type: ignore[misc]
        return freed

    def end_training(self) -> None:
        """End as accelerate does, with nothing of the last update left pending."""
        self.attachment.flush()
        super().end_training()  # type: ignore[misc]


def attached_class(kind: type) -> type:
    """Return the subclass of an accelerator's class that an attached one has."""
    return type(f"Attached{kind.__name__}", (AttachedAccelerator, kind), {})


class AttachedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """accelerate's wrapper of an optimizer, which tells the truth about skipped updates."""

    attachment: Attachment

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last update was skipped; waits for it."""
        if self.attachment.answers_late:
            return False
        return self.attachment.step.was_skipped(self.optimizer)

    def step(self, closure: None = None) -> None:
        """Do the whole update after the last micro-batch; before, do nothing."""
        if self.attachment.is_loading:
            # torch makes the state that it loads sharded ones into by a step of its own.
            self.optimizer.step(closure)
            return
        # Not accelerate's own, which puts another `step` in the optimizer's place while it runs.
        if self.gradient_state.sync_gradients:
            self.scaler.step(self.optimizer, closure)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with the rates of the next update; waits for the last."""
        self.attachment.flush()
        state: dict[str, Any] = super().state_dict()
        return state

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # noqa: FBT001  (accelerate's signature)
        """Zero the gradients after the last micro-batch of an update."""
        super().zero_grad(set_to_none)
        step = self.attachment.step
        if self.gradient_state.sync_gradients and self.optimizer in step.windows:
            step.give_up(self.optimizer)


_WITH_SCALER = (
    "_accelerate_step_called",
    "_optimizer_original_step_method",
    "_optimizer_patched_step_method",
)


def restore_optimizer(optimizer: Any, grad_scaler: Any) -> None:
    """Make an `AttachedOptimizer` what accelerate would have made with its own scaler."""
    optimizer.__class__ = AcceleratedOptimizer
    optimizer.scaler = grad_scaler
    del optimizer.attachment
    if grad_scaler is None:
        # accelerate sets these only where it has a scaler.
        for name in _WITH_SCALER:
            optimizer.__dict__.pop(name, None)


def restore_scheduler(scheduler: Any) -> None:
    """Make an `AttachedScheduler` what accelerate has made; any other stays as it is."""
    if isinstance(scheduler, AttachedScheduler):
        scheduler.__class__ = AcceleratedScheduler
        del scheduler.attachment
        del scheduler.requests


class AttachedScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """accelerate's wrapper of a schedule, which advances just before the next update.

    Only then it is known without waiting whether the last one was applied. A schedule that is
    stepped with a metric (``ReduceLROnPlateau``) is stepped at once, and waits.
    """

    attachment: Attachment
    requests: list[ScheduleRequest]
    gradient_state: Any

    def step(self, *args: Any, **keywords: Any) -> None:
        """Ask for a step, which is done unless the last update turns out to be skipped."""
        waits = self.step_with_optimizer and self.gradient_state.sync_gradients
        if waits and not is_stepped_with_a_metric(self.scheduler):
            self.requests.append(ScheduleRequest.now(self.scheduler, args, keywords))
            return
        if waits:
            self.attachment.flush()
        super().step(*args, **keywords)

    def resolve(self) -> None:
        """Do what was asked for, unless the last update was skipped."""
        requests, self.requests = self.requests, []
        if not requests:
            return
        state = self.gradient_state
        # It was asked for after the last micro-batch; meanwhile the next one may have begun.
        self.gradient_state = _AfterLastMicroBatch()
        step = super().step
        try:
            advance(
                self.scheduler,
                requests,
                lambda request: step(*request.arguments, **request.keywords),
            )
        finally:
            self.gradient_state = state

    def state_dict(self) -> dict[str, Any]:
        """Return the schedule's state after all updates so far; waits for the last one."""
        self.attachment.flush()
        state: dict[str, Any] = super().state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the schedule; what was asked for is dropped."""
        self.requests.clear()
        super().load_state_dict(state_dict)


class _AfterLastMicroBatch:
    sync_gradients = True


class StepScaler:
    """`torch.amp.GradScaler`'s protocol, by which accelerate scales losses and does updates.

    Args:
        attachment: Where the step is.
        grad_scaler: accelerate's own, for the settings that its checkpoints hold; ``None`` if it
            has none.
    """

    def __init__(self, attachment: Attachment, grad_scaler: Any) -> None:
        self.attachment = attachment
        self._grad_scaler = grad_scaler

    def is_enabled(self) -> bool:
        """Return True: losses are scaled, though maybe by 1."""
        return True

    def scale(self, outputs: Tensor) -> Tensor:
        """Return a loss times the loss scale."""
        self.attachment.build(final=True)
        return self.attachment.step.scaled(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the loss scale, in place, once."""
        self.attachment.build(final=True)
        self.attachment.step.unscale([unwrapped_optimizer(optimizer)])

    def step(self, optimizer: Optimizer, closure: None = None) -> None:
        """Do one update of an optimizer.

        Raises:
            TypeError: If a closure is given: a loss that it evaluates would not be scaled.
        """
        if closure is not None:
            msg = f"`closure` must be None with a loss scale, got {described(closure)}"
            raise TypeError(msg)
        self.attachment.build(final=True)
        self.attachment.step.update(unwrapped_optimizer(optimizer))

    def update(self, new_scale: Tensor | float | None = None) -> None:
        """Set the loss scale if one is given; otherwise the step has changed it already."""
        if new_scale is not None:
            loss_scale = self.attachment.step.loss_scale
            loss_scale.set(loss_scale.value.new_tensor(new_scale))

    def get_scale(self) -> float:
        """Return the loss scale; waits for the device."""
        return self.attachment.step.loss_scale.value.item()

    def state_dict(self) -> dict[str, Any]:
        """Return a state that a GradScaler of accelerate's settings can load."""
        state: dict[str, Any] = {} if self._grad_scaler is None else self._grad_scaler.state_dict()
        state["scale"] = self.get_scale()
        cell = self.attachment.step.loss_scale.update_cell
        if isinstance(cell, DynamicLossScaleUpdateCell):
            # torch counts steps since the scale changed from 0, MindSpore from 1.
            state["_growth_tracker"] = int(cell.cur_iter - cell.last_overflow_iter) - 1
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the scale of a GradScaler's state."""
        self.update(state_dict["scale"])
