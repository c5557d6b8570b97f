"""What the cell takes over from an accelerator of accelerate, and what it changes there."""

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mfwrap.arguments import described
from mfwrap.compatibility.accelerate import check_sharded_load, optimizers_of
from mfwrap.config import StepConfig
from mfwrap.loss_scale.cells import DynamicLossScaleUpdateCell
from mfwrap.loss_scale.live import ScaleSense
from mfwrap.records.run_files import resume_records, save_records
from mfwrap.tensors.wrappers import is_instance_of

if TYPE_CHECKING:
    from accelerate import Accelerator


class _NotGiven(float):
    """Type of the default loss scale; distinguishes the default from 1.0 passed by the caller."""


DEFAULT_SCALE = _NotGiven(1.0)
"""Default of `MFTrainOneStepCell`'s `scale_sense`."""


def check_accelerator(accelerator: "Accelerator", config: StepConfig) -> None:
    """Check the type of `accelerator`, and that it accumulates gradients as `config` says.

    Raises:
        TypeError: If `accelerator` is not an ``accelerate.Accelerator``.
        ValueError: If the accelerator accumulates a different number of micro-batches, or differs
            in whether it reduces the gradients of each.
    """
    if not is_instance_of(accelerator, "accelerate", "Accelerator"):
        msg = (
            f"`accelerator` must be an accelerate.Accelerator or None, got {described(accelerator)}"
        )
        raise TypeError(msg)
    of_accelerator = {
        "gradient_accumulation_steps": accelerator.gradient_accumulation_steps,
        "sync_each_batch": reduces_each_batch(accelerator),
    }
    for name, expected in of_accelerator.items():
        value = getattr(config, name)
        if value != expected:
            msg = f"`{name}` must be {expected}, as in the accelerator, got {value}"
            raise ValueError(msg)


def reduces_each_batch(accelerator: "Accelerator") -> bool:
    """Return whether the accelerator reduces the gradients of each micro-batch.

    It does with ``GradientAccumulationPlugin(sync_each_batch=True)``.
    """
    return bool(accelerator.gradient_state.plugin_kwargs.get("sync_each_batch", False))


def scale_of(accelerator: "Accelerator") -> ScaleSense:
    """Return the loss scale of an accelerator's gradient scaler; 1 without an enabled scaler.

    Raises:
        ValueError: If the accelerator trains in float16 on a device other than the CPU without an
            enabled gradient scaler.
    """
    scaler = accelerator.scaler
    if scaler is not None and scaler.is_enabled():
        return DynamicLossScaleUpdateCell.from_grad_scaler(scaler)
    if accelerator.mixed_precision == "fp16" and accelerator.device.type != "cpu":
        msg = (
            "`scale_sense` must be given for an accelerator that trains in fp16 without an enabled "
            "gradient scaler (another step may have removed the scaler)"
        )
        raise ValueError(msg)
    return 1.0


def effective_scale(scale_sense: ScaleSense, accelerator: "Accelerator | None") -> ScaleSense:
    """Return `scale_sense`, or the accelerator's loss scale if `scale_sense` was not set.

    Raises:
        ValueError: As `scale_of`, if the caller did not set `scale_sense`.
    """
    if accelerator is None or not isinstance(scale_sense, _NotGiven):
        return scale_sense
    return scale_of(accelerator)


def remove_grad_scaler(accelerator: "Accelerator") -> None:
    """Remove accelerate's gradient scaler: it would scale the loss a second time."""
    accelerator.scaler = None
    for optimizer in optimizers_of(accelerator):
        optimizer.scaler = None


def join_saves(accelerator: "Accelerator", flush: Callable[[], None]) -> None:
    """Make an accelerator flush a cell before each save, and save and resume the run's records.

    The cell's ``state_dict`` flushes, too, but accelerate saves the schedule before it calls the
    cell's ``state_dict``. Without the hook on saves, the saved schedule would lack the step of the
    last update.

    The accelerator keeps its hooks forever. So the hooks hold a weak reference to the cell:
    otherwise the cell and its network would live until after the process group is destroyed.

    Args:
        accelerator: Accelerator that saves and loads the run.
        flush: Bound method ``flush`` of the cell.
    """
    method = weakref.WeakMethod(flush)
    owner = weakref.ref(accelerator)

    def before_save(_models: object, _weights: object, output_dir: str) -> None:
        alive = method()
        if alive is not None:
            alive()
            save_records(Path(output_dir))

    def before_load(_models: object, input_dir: str) -> None:
        if method() is not None:
            check_sharded_load(owner())
            resume_records(Path(input_dir))

    accelerator.register_save_state_pre_hook(before_save)
    accelerator.register_load_state_pre_hook(before_load)
