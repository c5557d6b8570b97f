"""Subclasses of accelerate's classes that run the training step.

`attach` gives accelerate's objects these classes by assigning to ``__class__``, and `detach` gives
them their old classes back. The loop or the Trainer therefore keeps the same accelerator,
optimizer and schedule objects, and its ``isinstance`` checks still hold.

How accelerate's calls reach the step:

- ``accelerator.backward(loss)`` calls ``accelerator.scaler.scale(loss)``; see `StepScaler`. The
  first call checks that the ranks agree.
- ``accelerator.clip_grad_norm_`` calls `mfwrap.accelerate.clipping.clip_grad_norm`, which lets
  the optimizer's step do the clipping if possible.
- ``optimizer.step()`` calls ``accelerator.scaler.step``, which does the whole update.
- ``scheduler.step()`` advances at once if the host knows whether the last update was applied.
  Otherwise it records a request, which is carried out just before the next update, or when the loop
  reads the schedule; see `mfwrap.schedules.deferred`.

These objects refer to the step, and the step refers to everything that is trained. A pickled
optimizer must contain none of that: with accelerate alone, the pickle contains torch's optimizer
only, and any process can load it. So a pickled accelerator, optimizer or schedule is the object
that `AttachedStep.detach` would leave.
"""

import math
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from typing import Any

from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer

from mfwrap.accelerate.attachment import Attachment
from mfwrap.accelerate.clipping import clip_grad_norm, clip_grad_value
from mfwrap.accelerate.data_workers import leave_signals_to_parent
from mfwrap.accelerate.schedules import attach_scheduler, restore_scheduler
from mfwrap.accelerate.state import newest_named_automatically
from mfwrap.arguments import described
from mfwrap.collectives import Section, rank_watch, section_clock
from mfwrap.compatibility.accelerate import (
    OF_SCALER,
    SAVE_HOOKS,
    SKIPPED,
    is_prepared,
    optimizers_of,
    schedulers_of,
)
from mfwrap.loss_scale.cells import DynamicLossScaleUpdateCell
from mfwrap.schedules.pickling import pickled_as
from mfwrap.step.backward_updates import refuse_update_in_backward
from mfwrap.step.parameters import refuse_generation_pipeline
from mfwrap.tensors.wrappers import unwrapped_optimizer

_LOST = (
    "`optimizer.zero_grad` discards the gradients of {} earlier micro-batches of this update; call "
    "it after `optimizer.step`, not before `accelerator.backward`"
)


class AttachedAccelerator:
    """Override the methods of an accelerator so that they run the training step.

    `attached_class` puts this class before the accelerator's own class.
    """

    attachment: Attachment
    project_configuration: Any
    scaler: Any
    sync_gradients: bool
    _optimizers: list[Any]

    def prepare(self, *args: Any, **keywords: Any) -> Any:
        """Prepare as accelerate does, and add the prepared optimizers to the step."""
        prepared = super().prepare(*args, **keywords)  # type: ignore[misc]  # (the accelerator's own method)
        self.attachment.build()
        return prepared

    def prepare_data_loader(self, *args: Any, **keywords: Any) -> Any:
        """Prepare a data loader as accelerate does; its workers leave signals to this process."""
        prepared = super().prepare_data_loader(*args, **keywords)  # type: ignore[misc]  # (the accelerator's own method)
        leave_signals_to_parent(prepared)
        return prepared

    def prepare_model(self, model: nn.Module, *args: Any, **keywords: Any) -> Any:
        """Prepare a model as accelerate does, and record its DistributedDataParallel modules.

        They must be recorded here: accelerate's own list has each model as it was before
        DistributedDataParallel wrapped it.
        """
        refuse_generation_pipeline(model)
        prepared = super().prepare_model(model, *args, **keywords)  # type: ignore[misc]  # (the accelerator's own method)
        self.attachment.see_model(prepared)
        return prepared

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> Any:  # noqa: FBT001  (accelerate's signature)
        """Prepare an optimizer so that its ``step`` does the whole update."""
        if not is_prepared(optimizer):
            # Remove a wrapper that the optimizer may already have, so that there is only one, and
            # `prepared.optimizer` is torch's optimizer.
            optimizer = unwrapped_optimizer(optimizer)
        refuse_update_in_backward(unwrapped_optimizer(optimizer))
        prepared = super().prepare_optimizer(optimizer, device_placement)  # type: ignore[misc]  # (the accelerator's own method)
        if type(prepared) is AcceleratedOptimizer:
            attach_optimizer(prepared, self.attachment, self.scaler)
            if not any(each is prepared for each in self._optimizers):
                self._optimizers.append(prepared)
        elif not isinstance(prepared, AttachedOptimizer):
            msg = (
                "`accelerator.prepare` must make an AcceleratedOptimizer of `optimizer`, but it "
                f"made {described(prepared)}"
            )
            raise TypeError(msg)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Prepare a schedule so that it advances only for applied updates."""
        prepared = super().prepare_scheduler(scheduler)  # type: ignore[misc]  # (the accelerator's own method)
        attach_scheduler(prepared, self.attachment)
        return prepared

    def accumulate(self, *models: Any) -> Any:
        """Accumulate as accelerate does, which numbers the micro-batches of an update."""
        self.attachment.numbers_micro_batches = True
        return super().accumulate(*models)  # type: ignore[misc]  # (the accelerator's own method)

    def backward(self, *args: Any, **keywords: Any) -> None:
        """Run backward as accelerate does; explain an error that another rank has caused.

        The loss is multiplied by 0 if `Attachment.is_weightless` is set.
        """
        if self.attachment.is_weightless:
            args = (args[0] * 0, *args[1:])
        gradient = None
        if len(args) == 1 and "gradient" not in keywords:
            gradient = self.attachment.step.first_gradient(args[0])
        if gradient is not None:
            keywords["gradient"] = gradient
        self.scaler.multiplies = gradient is None
        try:
            with (
                self.attachment.explaining_memory(Section.FORWARD_BACKWARD),
                self.attachment.ranks.updating(ends=False),
            ):
                super().backward(*args, **keywords)  # type: ignore[misc]  # (the accelerator's own method)
        finally:
            self.scaler.multiplies = True
            self.attachment.end_backward()
        section_clock.switch(Section.DATA)
        for window in self.attachment.step.windows.values():
            window.after_backward()
        if self.sync_gradients:
            for observer in self.attachment.observers:
                observer.after_backward()

    def log(self, values: dict[str, Any], step: int | None = None, *args: Any, **kw: Any) -> None:
        """Log as accelerate does, after the pending record of an earlier step."""
        for observer in self.attachment.observers:
            observer.before_log(step)
        super().log(values, step, *args, **kw)  # type: ignore[misc]  # (the accelerator's own method)

    def clip_grad_norm_(
        self, parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2
    ) -> Tensor:
        """Clip the unscaled gradients, and return their norm before clipping.

        The optimizer's step does the clipping if possible; see `clip_grad_norm`.
        """
        if norm_type == 2 and isinstance(max_norm, int | float) and math.isfinite(max_norm):
            self.attachment.max_grad_norm = float(max_norm)
        with self.attachment.explaining_memory(Section.UPDATE):
            return clip_grad_norm(
                list(self.attachment.windows.values()),
                parameters,
                self.attachment.step.loss_scale.value,
                max_norm=max_norm,
                norm_type=float(norm_type),
                may_fold=self.sync_gradients,
            )

    def clip_grad_value_(self, parameters: Iterable[Tensor] | Tensor, clip_value: float) -> None:
        """Clamp the unscaled gradients, in place."""
        clip_grad_value(list(self.attachment.windows.values()), parameters, clip_value)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by the loss scale, in place, in any precision."""
        windows = self.attachment.windows
        if optimizer is None:
            optimizer = list(windows)
        elif not isinstance(optimizer, (tuple, list)):
            optimizer = [optimizer]
        for each in optimizer:
            windows[unwrapped_optimizer(each)].unscale()

    def save_state(self, output_dir: Any = None, *args: Any, **keywords: Any) -> Any:
        """Save as accelerate does, and write the step's state to its own files.

        An older checkpoint is replaced or deleted after the new one is complete, see `whole_state`.
        """
        save = super().save_state  # type: ignore[misc]  # (the accelerator's own method)
        return self.attachment.checkpoints.saving(
            output_dir,
            lambda folder: save(folder, *args, **keywords),
            is_safe=bool(keywords.get("safe_serialization", args[0] if args else True)),
        )

    def load_state(self, input_dir: Any = None, *args: Any, **keywords: Any) -> Any:
        """Verify the checkpoint, load as accelerate does, and restore the step's state.

        Raises:
            ValueError: If the checkpoint is damaged. Nothing has been loaded then.
        """
        load = super().load_state  # type: ignore[misc]  # (the accelerator's own method)
        self.attachment.checkpoints.settle()  # the newest checkpoint may not have its name yet
        if input_dir is None:
            input_dir = newest_named_automatically(self.project_configuration)
        return self.attachment.checkpoints.loading(
            input_dir, lambda: load(input_dir, *args, **keywords)
        )

    def free_memory(self, *objects: Any) -> Any:
        """Drop everything that was prepared, and free memory as accelerate does."""
        try:
            self.attachment.clear()
        finally:
            freed = super().free_memory(*objects)  # type: ignore[misc]  # (the accelerator's own method)
        return freed

    def end_training(self) -> None:
        """Flush the step and a checkpoint, tell the other ranks, then end as accelerate does."""
        self.attachment.checkpoints.settle()
        self.attachment.flush()
        for observer in self.attachment.observers:
            observer.before_end()
        watch = rank_watch()
        if watch is not None:
            watch.leave("has ended its training")
        super().end_training()  # type: ignore[misc]  # (the accelerator's own method)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A copy is an accelerator of the user's class without the step, as after `detach`: the step
        # may hold functions that cannot be pickled. `AttachedStep` itself pickles with the step.
        values: dict[str, Any] = {"scaler": self.scaler.grad_scaler()}
        own = self.attachment.checkpoints
        for name in SAVE_HOOKS:
            hooks = getattr(self, name).items()
            kept = {key: h for key, h in hooks if getattr(h, "__self__", None) is not own}
            values[name] = OrderedDict(kept)
        # The class of `attached_class` comes first, then this one, then the user's.
        return pickled_as(type(self).__mro__[2], self, without=("attachment",), **values)


def attached_class(kind: type) -> type:
    """Create a subclass of an accelerator's class, which `attach` then gives to the accelerator."""
    return type(f"Attached{kind.__name__}", (AttachedAccelerator, kind), {})


class AttachedOptimizer(AcceleratedOptimizer):  # type: ignore[misc]  # (accelerate is untyped)
    """Wrap an optimizer as accelerate does; ``step`` does the whole update."""

    attachment: Attachment

    @property
    def step_was_skipped(self) -> bool:
        """Whether the last update was skipped. Synchronizes with the device if it must."""
        if self.attachment.answers_late and not self.outcome_is_known:
            return False
        return self.attachment.step.was_skipped(self.optimizer)

    @property
    def outcome_is_known(self) -> bool:
        """Whether `step_was_skipped` is known to the host without synchronizing with the device."""
        return self.attachment.step.outcome_is_known(self.optimizer)

    def step(self, closure: None = None) -> None:
        """Do the whole update after the last micro-batch; do nothing after earlier ones."""
        if self.attachment.is_loading:
            # Before torch loads sharded state, it calls `step` without gradients, so that the
            # optimizer creates the tensors to load into. This call must not be an update.
            self.optimizer.step(closure)
            return
        # Do not call `super().step`: accelerate's method would replace torch's `optimizer.step`
        # during the call, to find out whether the scaler calls `optimizer.step`.
        if self.gradient_state.sync_gradients:
            self.scaler.step(self.optimizer, closure)

    def state_dict(self) -> dict[str, Any]:
        """Flush the step; return the optimizer's state with the next update's learning rates."""
        if self.attachment.hides_optimizers:
            return {}
        self.attachment.flush()
        state: dict[str, Any] = super().state_dict()
        return state

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A copy is accelerate's own optimizer with the rates of the next update, as after `detach`.
        self.attachment.step.resolve_schedules()
        return pickled_as(
            AcceleratedOptimizer,
            self,
            without=("attachment",),
            scaler=self.scaler.grad_scaler(),
            **{SKIPPED: self.step_was_skipped},
        )

    def zero_grad(self, set_to_none: bool | None = None) -> None:  # noqa: FBT001  (accelerate's signature)
        """After the last micro-batch, zero the gradients and discard their norms."""
        window = self.attachment.step.windows.get(self.optimizer)
        if window is None or not self.gradient_state.sync_gradients:
            super().zero_grad(set_to_none)
            return
        accumulates = self.attachment.accelerator.gradient_accumulation_steps > 1
        if accumulates and window.num_backward and window.has_unused_gradients():
            warnings.warn(_LOST.format(window.num_backward), stacklevel=2)
        super().zero_grad(set_to_none)
        window.restart()


def attach_optimizer(optimizer: Any, attachment: Attachment, scaler: "StepScaler") -> None:
    """Make an `AttachedOptimizer` of accelerate's optimizer, in place."""
    optimizer.__class__ = AttachedOptimizer
    optimizer.attachment = attachment
    # If another accelerator has prepared the optimizer, its scaler is None or the other's.
    optimizer.scaler = scaler


def restore_prepared(accelerator: Any, grad_scaler: Any) -> None:
    """Restore prepared optimizers and schedules to accelerate's own classes, in place.

    Args:
        accelerator: Accelerator that has prepared them.
        grad_scaler: accelerate's own gradient scaler; ``None`` if accelerate uses no scaler.
    """
    for optimizer in optimizers_of(accelerator):
        _restore_optimizer(optimizer, grad_scaler)
    for scheduler in schedulers_of(accelerator):
        restore_scheduler(scheduler)


def _restore_optimizer(optimizer: Any, grad_scaler: Any) -> None:
    optimizer.__class__ = AcceleratedOptimizer
    optimizer.scaler = grad_scaler
    del optimizer.attachment
    if grad_scaler is None:
        # Remove the attributes that accelerate sets only on an optimizer with a scaler: the
        # optimizer had our scaler, and has no scaler now.
        for name in OF_SCALER:
            optimizer.__dict__.pop(name, None)


class StepScaler:
    """Scale losses and do updates for accelerate, which calls this as its gradient scaler.

    It has the methods of ``torch.amp.GradScaler`` that accelerate and the Trainer call.

    Args:
        attachment: Step that is attached to the accelerator.
        grad_scaler: accelerate's own gradient scaler, or ``None``. `state_dict` includes its
            settings.
    """

    def __init__(self, attachment: Attachment, grad_scaler: Any) -> None:
        self.attachment = attachment
        self._grad_scaler = grad_scaler
        self.multiplies = True
        """Whether `scale` multiplies; ``False`` if backward begins with the loss scale."""

    def is_enabled(self) -> bool:
        """Return True: losses are always scaled, if only by 1."""
        return True

    def scale(self, outputs: Tensor) -> Tensor:
        """Return a loss times the loss scale, or the loss itself unless `multiplies`."""
        return self.attachment.begin_backward(outputs, multiplies=self.multiplies)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the loss scale, in place, once."""
        self.attachment.accelerator.unscale_gradients(optimizer)

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
        inner = optimizer.optimizer if isinstance(optimizer, AttachedOptimizer) else optimizer
        self.attachment.update(inner)

    def update(self, new_scale: Tensor | float | None = None) -> None:
        """Set the loss scale to `new_scale`; with ``None`` leave it, because `step` updates it."""
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
            # Both counters count the steps since the last change of the scale, but torch counts
            # from 0 and MindSpore from 1.
            state["_growth_tracker"] = int(cell.cur_iter - cell.last_overflow_iter) - 1
        return state

    def grad_scaler(self) -> Any:
        """Return accelerate's own gradient scaler with the step's loss scale; ``None`` for none."""
        if self._grad_scaler is not None and self._grad_scaler.is_enabled():
            self._grad_scaler.load_state_dict(self.state_dict())
        return self._grad_scaler

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Set the loss scale to the scale in a GradScaler's state."""
        self.update(state_dict["scale"])
