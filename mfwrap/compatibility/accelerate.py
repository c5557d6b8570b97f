"""What an accelerator of accelerate has prepared, for which there are no public names."""

from importlib.metadata import version
from typing import Any

from mfwrap.compatibility.foreign import ForeignName, is_installed

_ACCELERATOR = "accelerate.accelerator"

SAVE_HOOKS = ("_save_model_state_pre_hook", "_load_model_state_pre_hook")
"""Attributes of an accelerator with the hooks of ``save_state`` and ``load_state``."""

OF_SCALER = (
    "_accelerate_step_called",
    "_optimizer_original_step_method",
    "_optimizer_patched_step_method",
)
"""Attributes that accelerate sets on an optimizer with a gradient scaler only."""

SKIPPED = "_is_overflow"
"""Attribute of an optimizer: whether its last update was skipped."""

NAMES = (
    ForeignName(_ACCELERATOR, "Accelerator._models"),
    ForeignName(_ACCELERATOR, "Accelerator._optimizers"),
    ForeignName(_ACCELERATOR, "Accelerator._schedulers"),
    ForeignName(_ACCELERATOR, "Accelerator._dataloaders"),
    *(ForeignName(_ACCELERATOR, f"Accelerator.{name}") for name in SAVE_HOOKS),
    ForeignName(_ACCELERATOR, "Accelerator.prepare._is_accelerate_prepared"),
    ForeignName(_ACCELERATOR, "Accelerator.prepare_model._original_forward"),
    *(
        ForeignName("accelerate.optimizer", f"AcceleratedOptimizer.{name}")
        for name in (*OF_SCALER, SKIPPED)
    ),
)


def models_of(accelerator: Any) -> list[Any]:
    """Return the networks that an accelerator has prepared, in order."""
    return list(accelerator._models)


def optimizers_of(accelerator: Any) -> list[Any]:
    """Return the wrapped optimizers that an accelerator has prepared, in order."""
    return list(accelerator._optimizers)


def schedulers_of(accelerator: Any) -> list[Any]:
    """Return the wrapped schedules that an accelerator has prepared, in order."""
    return list(accelerator._schedulers)


def data_loaders_of(accelerator: Any) -> list[Any]:
    """Return the data loaders that an accelerator has prepared, in order."""
    return list(accelerator._dataloaders)


def check_sharded_load(accelerator: Any) -> None:
    """Check that accelerate can load the optimizer of a network that its FSDP plugin has sharded.

    Before 1.13, accelerate gives a new optimizer none of the state that it has saved in shards, and
    says nothing, so a resumed training would begin with moments of 0.

    Args:
        accelerator: Accelerator that is about to load a checkpoint.

    Raises:
        ValueError: If accelerate would not load the optimizer's state.
    """
    if accelerator.distributed_type != "FSDP" or is_installed("accelerate", "1.13"):
        return
    if "FULL" not in str(accelerator.state.fsdp_plugin.state_dict_type):
        msg = (
            f"cannot resume: accelerate {version('accelerate')} does not load the state of an "
            "optimizer that was saved in shards; install accelerate 1.13 or newer, or save with "
            "state_dict_type='FULL_STATE_DICT' of accelerate's FSDP plugin"
        )
        raise ValueError(msg)


def is_prepared(optimizer: Any) -> bool:
    """Return whether accelerate has prepared an object."""
    return bool(getattr(optimizer, "_is_accelerate_prepared", False))


def computes_in_autocast(model: Any) -> bool:
    """Return whether accelerate has wrapped the forward of a model in autocast."""
    return hasattr(model, "_original_forward")


def has_own_save_hooks(accelerator: Any) -> bool:
    """Return whether a user has registered hooks of ``save_state``, beside the attached step's."""
    return len(getattr(accelerator, SAVE_HOOKS[0])) > 1
