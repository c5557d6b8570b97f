"""accelerate's own classes, with the training step behind them.

`attach` moves objects of accelerate into these classes, and `detach` moves them back, by assigning
to their ``__class__``. Whoever holds an accelerator, an optimizer or a schedule (the loop, the
Trainer) therefore keeps holding the same object, and ``isinstance`` answers as before.

How accelerate's calls reach the step:

- ``accelerator.backward(loss)`` multiplies the loss by ``accelerator.scaler.scale``: `StepScaler`.
- ``accelerator.clip_grad_norm_`` goes to `mfwrap.accelerate.gradients`, because accelerate's own
  would clip gradients that are still scaled.
- ``optimizer.step()`` goes to ``accelerator.scaler.step``, which does the whole update.
- ``scheduler.step()`` is only noted, and done just before the next update. By then the host can
  learn whether this update was applied without stopping the device; see
  `mfwrap.schedules.deferred`.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from torch import Tensor
from torch.optim import Optimizer

from mfwrap.accelerate.gradients import clip_grad_norm, clip_grad_value
from mfwrap.arguments import described
from mfwrap.loss_scale.cells import DynamicLossScaleUpdateCell
from mfwrap.schedules.deferred import ScheduleRequest, advance, is_stepped_with_a_metric
from mfwrap.tensors.wrappers import unwrapped_optimizer

if TYPE_CHECKING:
    from mfwrap.accelerate.attached_step import AttachedStep


class AttachedAccelerator:
    """What `attached_class` puts before an accelerator's own class."""

    attachment: "AttachedStep"
    scaler: Any
    sync_gradients: bool
    _optimizers: list[Any]

    def prepare(self, *args: Any, **keywords: Any) -> Any:
        """Prepare as accelerate does, and add to the step what was prepared."""
        prepared = super().prepare(*args, **keywords)  # type: ignore[misc]  # (the accelerator's own method)
        self.attachment.build()
        return prepared

    def prepare_model(self, *args: Any, **keywords: Any) -> Any:
        """Prepare a model as accelerate does, and find its DistributedDataParallel parts.

        accelerate's own list of models has them without DistributedDataParallel.
        """
        prepared = super().prepare_model(*args, **keywords)  # type: ignore[misc]  # (the accelerator's own method)
        self.attachment.see_model(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:  # noqa: FBT001  (accelerate's signature)
        """Prepare an optimizer whose ``step`` is the whole update."""
        if not getattr(optimizer, "_is_accelerate_prepared", False):
            # One wrapper at most: afterwards `prepared.optimizer` is what does the updates.
            optimizer = unwrapped_optimizer(optimizer)
        prepared = super().prepare_optimizer(optimizer, device_placement)  # type: ignore[misc]  # (the accelerator's own method)
        if type(prepared) is AcceleratedOptimizer:
            prepared.__class__ = AttachedOptimizer
            prepared.attachment = self.attachment
            # An optimizer that another accelerator has prepared comes back with its own scaler,
            # or none.
            prepared.scaler = self.scaler
            if not any(each is prepared for each in self._optimizers):
                self._optimizers.append(prepared)
        elif not isinstance(prepared, AttachedOptimizer):
            msg = (
                "`optimizer` must become an AcceleratedOptimizer in `accelerator.prepare`, got "
                f"{described(prepared)}"
            )
            raise TypeError(msg)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a schedule that counts applied updates only."""
        prepared = super().prepare_scheduler(scheduler)  # type: ignore[misc]  # (the accelerator's own method)
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
        step = self.attachment.step
        return clip_grad_norm(
            list(step.windows.values()),
            given,
            step.loss_scale.value,
            max_norm=max_norm,
            norm_type=float(norm_type),
            may_fold=self.sync_gradients,
        )

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp the unscaled gradients, in place."""
        self.attachment.build(final=True)
        given = [parameters] if isinstance(parameters, Tensor) else parameters
        clip_grad_value(list(self.attachment.step.windows.values()), given, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale, in place, in any precision."""
        self.attachment.build(final=True)
        windows = self.attachment.step.windows
        if optimizer is None:
            optimizer = list(windows)
        elif not isinstance(optimizer, (tuple, list)):
            optimizer = [optimizer]
        for each in optimizer:
            windows[unwrapped_optimizer(each)].unscale()

    def save_state(self, *args: Any, **keywords: Any) -> Any:
        """Save as accelerate does, and the step's state in files of its own."""
        save = super().save_state  # type: ignore[misc]  # (the accelerator's own method)
        return self.attachment.saving(lambda: save(*args, **keywords))

    def load_state(self, *args: Any, **keywords: Any) -> Any:
        """Load as accelerate does, and the step's state."""
        load = super().load_state  # type: ignore[misc]  # (the accelerator's own method)
        self.attachment.build(final=True)
        return self.attachment.loading(lambda: load(*args, **keywords))

    def free_memory(self, *objects: Any) -> Any:
        """Forget everything that has been prepared."""
        try:
            self.attachment.clear()
        finally:
            freed = super().free_memory(*objects)  # type: ignore[misc]  # (the accelerator's own method)
        return freed

    def end_training(self) -> None:
        """Read the results of the last update, then end as accelerate does."""
        self.attachment.flush()
        super().end_training()  # type: ignore[misc]  # (the accelerator's own method)


def attached_class(kind: type) -> type:
    """Return the subclass of an accelerator's class that `attach` moves the accelerator into."""
    return type(f"Attached{kind.__name__}", (AttachedAccelerator, kind), {})


class AttachedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # (accelerate is untyped)
    """accelerate's wrapper of an optimizer; its ``step`` is the whole update."""

    attachment: "AttachedStep"

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last update was skipped. Synchronizes with the device."""
        if self.attachment.answers_late:
            return False
        return self.attachment.step.was_skipped(self.optimizer)

    def step(self, closure: None = None) -> None:
        """Do the whole update after the last micro-batch, and nothing before it."""
        if self.attachment.is_loading:
            # Before torch loads sharded state, it calls `step` without gradients, so that the
            # optimizer creates the tensors to load into. This call must not be an update.
            self.optimizer.step(closure)
            return
        # Not `super().step`: with a scaler, accelerate replaces the optimizer's own `step` for
        # the duration of the call, to learn whether the scaler has skipped it.
        if self.gradient_state.sync_gradients:
            self.scaler.step(self.optimizer, closure)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, with the rates of the next update, after a flush."""
        self.attachment.flush()
        state: dict[str, Any] = super().state_dict()
        return state

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # noqa: FBT001  (accelerate's signature)
        """Zero the gradients, and forget what is known of them, after the last micro-batch."""
        super().zero_grad(set_to_none)
        windows = self.attachment.step.windows
        if self.gradient_state.sync_gradients and self.optimizer in windows:
            windows[self.optimizer].open()


_WITH_SCALER = (
    "_accelerate_step_called",
    "_optimizer_original_step_method",
    "_optimizer_patched_step_method",
)


def restore_optimizer(optimizer: Any, grad_scaler: Any) -> None:
    """Make an `AttachedOptimizer` what accelerate would have made of it.

    Args:
        optimizer: An `AttachedOptimizer`.
        grad_scaler: accelerate's own gradient scaler; ``None`` if it has none.
    """
    optimizer.__class__ = AcceleratedOptimizer
    optimizer.scaler = grad_scaler
    del optimizer.attachment
    if grad_scaler is None:
        # accelerate sets these only where it has a scaler.
        for name in _WITH_SCALER:
            optimizer.__dict__.pop(name, None)


def restore_scheduler(scheduler: Any) -> None:
    """Make an `AttachedScheduler` what accelerate has made; leave any other as it is."""
    if isinstance(scheduler, AttachedScheduler):
        scheduler.__class__ = AcceleratedScheduler
        del scheduler.attachment
        del scheduler.requests


class AttachedScheduler(AcceleratedScheduler):  # type: ignore[misc]  # (accelerate is untyped)
    """accelerate's wrapper of a schedule; it advances just before the next update.

    Only then can the host learn, without stopping the device, whether the last update was applied.
    A schedule that is stepped with a metric (``ReduceLROnPlateau``) advances at once, which
    synchronizes with the device.
    """

    attachment: "AttachedStep"
    requests: list[ScheduleRequest]
    gradient_state: Any

    def step(self, *args: Any, **keywords: Any) -> None:
        """Request a step, which is done later unless the last update turns out to be skipped."""
        follows_update = self.step_with_optimizer and self.gradient_state.sync_gradients
        if follows_update and not is_stepped_with_a_metric(self.scheduler):
            self.requests.append(ScheduleRequest.now(self.scheduler, args, keywords))
            return
        if follows_update:
            self.attachment.flush()
        super().step(*args, **keywords)

    def resolve(self) -> None:
        """Do the requested steps, unless the last update was skipped."""
        requests, self.requests = self.requests, []
        if not requests:
            return
        state = self.gradient_state
        # accelerate ignores steps between micro-batches. These were requested after the last
        # micro-batch of an update, but the first one of the next update may have begun since.
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
        """Return the schedule's state after all updates so far. Synchronizes with the device."""
        self.attachment.flush()
        state: dict[str, Any] = super().state_dict()
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the schedule; requested steps are dropped."""
        self.requests.clear()
        super().load_state_dict(state_dict)


class _AfterLastMicroBatch:
    """Stands in for accelerate's gradient state after the last micro-batch of an update."""

    sync_gradients = True


class StepScaler:
    """``torch.amp.GradScaler``'s methods, by which accelerate scales losses and does updates.

    Args:
        attachment: Step that is attached to the accelerator.
        accelerator: Accelerator with its own gradient scaler still in place. The settings of that
            scaler are part of accelerate's checkpoints.
    """

    def __init__(self, attachment: "AttachedStep", accelerator: Any) -> None:
        self.attachment = attachment
        self._accelerator = accelerator
        self._grad_scaler = accelerator.scaler

    def is_enabled(self) -> bool:
        """Return True: losses are always scaled, if only by 1."""
        return True

    def scale(self, outputs: Tensor) -> Tensor:
        """Return a loss times the loss scale."""
        self.attachment.build(final=True)
        return self.attachment.step.scaled(outputs, self._accelerator.step)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the loss scale, in place, once."""
        self._accelerator.unscale_gradients(optimizer)

    def step(self, optimizer: Any, closure: None = None) -> None:
        """Do one update of an optimizer.

        Raises:
            TypeError: If a closure is given: a loss that it evaluates would not be scaled.
        """
        if closure is not None:
            msg = (
                f"`closure` must be None, got {described(closure)}: the loss that it evaluates "
                "would not be scaled; call `accelerator.backward(loss)` before `optimizer.step()`"
            )
            raise TypeError(msg)
        self.attachment.build(final=True)
        inner = optimizer.optimizer if isinstance(optimizer, AttachedOptimizer) else optimizer
        self.attachment.step.update(inner, self._accelerator.gradient_accumulation_steps)

    def update(self, new_scale: Tensor | float | None = None) -> None:
        """Set the loss scale if one is given; otherwise `step` has changed it already."""
        if new_scale is not None:
            loss_scale = self.attachment.step.loss_scale
            loss_scale.set(loss_scale.value.new_tensor(new_scale))

    def get_scale(self) -> float:
        """Return the loss scale. Synchronizes with the device."""
        return self.attachment.step.loss_scale.value.item()

    def state_dict(self) -> dict[str, Any]:
        """Return a state that a GradScaler with accelerate's settings can load."""
        state: dict[str, Any] = {} if self._grad_scaler is None else self._grad_scaler.state_dict()
        state["scale"] = self.get_scale()
        cell = self.attachment.step.loss_scale.update_cell
        if isinstance(cell, DynamicLossScaleUpdateCell):
            # torch counts the steps since the scale changed from 0, MindSpore from 1.
            state["_growth_tracker"] = int(cell.cur_iter - cell.last_overflow_iter) - 1
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the scale of a GradScaler's state."""
        self.update(state_dict["scale"])
