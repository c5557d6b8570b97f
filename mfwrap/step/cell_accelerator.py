"""What a cell takes over from the accelerator that it is given."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

from mfwrap.loss_scale.cells import DynamicLossScaleUpdateCell
from mfwrap.loss_scale.live import ScaleSense

if TYPE_CHECKING:
    from accelerate import Accelerator

__all__ = [
    "DEFAULT_SCALE",
    "check_accumulation",
    "effective_scale",
    "flush_before_save",
    "remove_grad_scaler",
]


class _NotGiven(float):
    """The default loss scale, told apart from the same number given by the caller."""


DEFAULT_SCALE = _NotGiven(1.0)
"""What `MFTrainOneStepCell` has for its `scale_sense` if none is given."""


def check_accumulation(accelerator: "Accelerator", steps: int) -> None:
    """Raise ``ValueError`` if an accelerator accumulates over another number of micro-batches."""
    if accelerator.gradient_accumulation_steps != steps:
        msg = (
            "`gradient_accumulation_steps` must be the accelerator's "
            f"{accelerator.gradient_accumulation_steps}, got {steps}"
        )
        raise ValueError(msg)


def effective_scale(scale_sense: ScaleSense, accelerator: "Accelerator | None") -> ScaleSense:
    """Return the accelerator's loss scale if none was given, as an update cell.

    Raises:
        ValueError: If it trains in float16 and has none.
    """
    if isinstance(scale_sense, _NotGiven) and accelerator is not None:
        scaler = accelerator.scaler
        if scaler is not None and scaler.is_enabled():
            return DynamicLossScaleUpdateCell.from_grad_scaler(scaler)
        if accelerator.mixed_precision == "fp16" and accelerator.device.type != "cpu":
            msg = (
                "`scale_sense` must be given with an accelerator in fp16 whose gradient scaler "
                "another cell has taken, got none"
            )
            raise ValueError(msg)
    return scale_sense


def remove_grad_scaler(accelerator: "Accelerator") -> None:
    """Take out accelerate's gradient scaler, which would scale a second time."""
    accelerator.scaler = None
    # accelerate keeps no public list of what it has prepared.
    for optimizer in accelerator._optimizers:
        optimizer.scaler = None


def flush_before_save(accelerator: "Accelerator", flush: Callable[[], None]) -> None:
    """Let an accelerator call a cell's method before it saves, as long as the cell lives.

    accelerate writes schedules before it asks the cell for its state. It keeps what it calls to its
    own end, and a cell must not live that long: its network would outlive its group of processes.

    Args:
        accelerator: Saves.
        flush: A bound method.
    """
    method = weakref.WeakMethod(flush)

    def before_save(*_: object) -> None:
        alive = method()
        if alive is not None:
            alive()

    accelerator.register_save_state_pre_hook(before_save)
