"""Restore what an accelerator has prepared, or attach a step to it after unpickling.

Attached objects have classes that `attach` creates or swaps in. They refer to the step, and the
step refers to everything that is trained. A pickled optimizer must contain none of that: with
accelerate alone, the pickle contains torch's optimizer only, and any process can load it. So a
pickled accelerator, optimizer or schedule is the object that `AttachedStep.detach` would leave.

Only the step itself pickles with its settings and its state. Loading it attaches it to the
accelerator that was pickled with it (`attached_again`).
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from accelerate.optimizer import AcceleratedOptimizer

from mfwrap.accelerate.classes import attach_optimizer
from mfwrap.accelerate.schedules import attach_scheduler, restore_scheduler
from mfwrap.compatibility.accelerate import OF_SCALER, models_of, optimizers_of, schedulers_of

if TYPE_CHECKING:
    from mfwrap.accelerate.attached_step import AttachedStep


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


def attached_again(
    kind: "type[AttachedStep]",
    accelerator: Any,
    arguments: tuple[Any, ...],
    state: Mapping[str, Any],
) -> "AttachedStep":
    """Attach a step to an unpickled accelerator, and to everything that it has prepared.

    Args:
        kind: `AttachedStep`.
        accelerator: Accelerator without a step.
        arguments: Further arguments of `AttachedStep`.
        state: State of the step, from `LoopStep.state_dict`.
    """
    if "attachment" in vars(accelerator):
        # The module `copy` was used. An accelerator is its own copy there, and so is its step.
        attachment: AttachedStep = accelerator.attachment
        return attachment
    attached = kind(accelerator, *arguments)
    for model in models_of(accelerator):
        attached.see_model(model)
    for optimizer in optimizers_of(accelerator):
        attach_optimizer(optimizer, attached, accelerator.scaler)
    for scheduler in schedulers_of(accelerator):
        attach_scheduler(scheduler, attached)
    # The first backward adds optimizers whose parameters are in no prepared model; see `build`.
    attached.build()
    if len(attached.step.windows) < len(state["updates"]):
        attached.build(final=True)
    if state["updates"]:
        attached.step.load_state_dict(state)
    else:
        attached.step.loss_scale.load_state_dict(state["loss_scale"])
    return attached
