"""Save and load the step's own files in a checkpoint: loss scale, counts and average."""

import re
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from mfwrap.accelerate.attachment import Attachment
from mfwrap.accelerate.loop_step import LoopStep
from mfwrap.arguments import callers_stacklevel
from mfwrap.checkpoints.step_files import (
    has_step_files,
    read_step_files,
    read_step_parts,
    write_step_files,
)
from mfwrap.loss_scale.cells import DynamicLossScaleUpdateCell
from mfwrap.step.counts import COUNTERS


def newest_named_automatically(configuration: ProjectConfiguration) -> Path | None:
    """Return the checkpoint that accelerate loads if ``load_state`` gets no folder.

    Returns:
        ``<project_dir>/checkpoints/checkpoint_<number>`` with the highest number. ``None`` if
        accelerate does not name checkpoints itself, or there is no checkpoint.
    """
    if not configuration.automatic_checkpoint_naming:
        return None
    return next(reversed(named_automatically(configuration)), None)


def named_automatically(configuration: ProjectConfiguration) -> list[Path]:
    """Return ``<project_dir>/checkpoints/checkpoint_<number>``, in the order of the numbers."""
    if configuration.project_dir is None:
        return []
    numbered = {
        int(match[1]): path
        for path in (Path(configuration.project_dir) / "checkpoints").glob("*")
        if (match := re.fullmatch(r"checkpoint_(\d+)", path.name))
    }
    return [numbered[number] for number in sorted(numbered)]


def is_writer(accelerator: Accelerator, *, each_node: bool | None = None) -> bool:
    """Return whether this process writes the files that all processes share.

    Args:
        accelerator: Accelerator of the process.
        each_node: If True, the main process of each node writes these files; if False, only the
            main process of the run. ``None`` takes the setting ``save_on_each_node`` of the
            accelerator's project configuration.
    """
    if each_node is None:
        each_node = accelerator.project_configuration.save_on_each_node
    return bool(accelerator.is_local_main_process if each_node else accelerator.is_main_process)


def step_content(attachment: Attachment) -> tuple[dict[str, Any], dict[str, Any]]:
    """Flush the step; return its state, whose averages are not copied, and a record for people."""
    step = attachment.step
    # Flush before anything else, because a flush may raise.
    state = step.state_dict()
    counts = [window.update.counts for window in step.windows.values()]
    record = {
        "loss_scale": step.loss_scale.value.item(),
        "applied_updates": [each.applied_updates.item() for each in counts],
        "skipped_updates": [each.skipped_updates.item() for each in counts],
    }
    return state, record


def save_step(folder: Path, attachment: Attachment, *, each_node: bool | None = None) -> None:
    """Flush the step, then write loss scale, counts and average. Call it on every process.

    A writer writes the files; with sharded weights each rank writes its own shards.

    Args:
        folder: Existing folder of the checkpoint.
        attachment: Step to save.
        each_node: As in `is_writer`.
    """
    state, record = step_content(attachment)
    writes = is_writer(attachment.accelerator, each_node=each_node)
    write_step_files(folder, state, record, is_writer=writes)


def check_saved_step(folder: Path, attachment: Attachment) -> None:
    """Raise the errors that `load_step` would raise; restore nothing.

    A checkpoint without any of the step's files passes the check.

    Args:
        folder: Folder of the checkpoint.
        attachment: Step to restore.
    """
    attachment.build(final=True)
    if has_step_files(folder):
        state = read_step_files(folder, attachment.step.state_dict())
        attachment.step.check_state_dict(_fitting(folder, state, attachment))


def load_step(folder: Path, attachment: Attachment) -> None:
    """Restore the state that `save_step` wrote; change nothing if a part does not fit.

    Load the weights before the call: if the checkpoint has no average, the average starts from the
    weights. A checkpoint without any of the step's files gives a warning, not an error, and sets
    the initial state.

    Args:
        folder: Folder of the checkpoint.
        attachment: Step to restore.

    Raises:
        FileNotFoundError: If only some of the step's files exist.
        KeyError: If a name is missing or unknown.
        TypeError: If a value has the wrong type.
        ValueError: If a file is damaged, or a value has the wrong shape or range.
    """
    attachment.build(final=True)
    if has_step_files(folder):
        state = read_step_files(folder, attachment.step.state_dict())
    else:
        state = _stock_state(folder, attachment.step)
    attachment.step.load_state_dict(_fitting(folder, state, attachment, warns=True))
    if attachment.ema is not None and "ema" not in state:
        warnings.warn(
            f"no average in {folder}: the average starts from the loaded weights",
            stacklevel=callers_stacklevel(),
        )
        attachment.ema.restart()


def has_average(folder: Path) -> bool:
    """Return whether a folder holds an average that `save_step` wrote.

    Raises:
        FileNotFoundError: If only some of the step's files exist.
        ValueError: If the record of the step is damaged.
    """
    return has_step_files(folder) and "ema" in read_step_parts(folder)


def saved_average(folder: Path, attachment: Attachment) -> dict[str, Any]:
    """Return the state of the average that `save_step` wrote; call it on every rank.

    Args:
        folder: Folder of the checkpoint, for which `has_average` is true.
        attachment: Step of the average.

    Raises:
        ValueError: If a file is damaged.
    """
    state: dict[str, Any] = read_step_files(folder, attachment.step.state_dict())["ema"]
    return state


def _fitting(
    folder: Path, state: dict[str, Any], attachment: Attachment, *, warns: bool = False
) -> dict[str, Any]:
    """Return a copy of a saved state; take parts that the checkpoint lacks from this run."""
    ema = attachment.ema
    if ema is None and "ema" in state:
        msg = (
            f"cannot resume from {folder}: it holds an average of the weights, but `ema` is None; "
            "pass `ema` to `attach`"
        )
        raise ValueError(msg)
    fitting = dict(state)
    if ema is not None:
        fitting.setdefault("ema", ema.state_dict())
    present = attachment.step.loss_scale.state_dict()
    if present["update_cell"].keys() != state["loss_scale"]["update_cell"].keys():
        fitting["loss_scale"] = present
        if warns:
            warnings.warn(
                f"the loss scale in {folder} belongs to another kind of update cell and is not "
                "restored; the loss scale keeps its present value",
                stacklevel=callers_stacklevel(),
            )
    return fitting


def _stock_state(folder: Path, step: LoopStep) -> dict[str, Any]:
    """Return the initial state for a checkpoint that was written without the step."""
    warnings.warn(
        f"no state of the step in {folder}: it was written without mfwrap; counts start from zero",
        stacklevel=callers_stacklevel(),
    )
    state = step.state_dict()
    state.pop("ema", None)
    # Without earlier norms: a policy for spikes then starts with none.
    state["updates"] = {
        number: {name: torch.zeros_like(update[name]) for name in COUNTERS}
        for number, update in state["updates"].items()
    }
    scaler = folder / "scaler.pt"
    if scaler.exists():
        saved = torch.load(scaler, weights_only=True)
        # A disabled GradScaler saves an empty dict. The loss scale then keeps its present value.
        state["loss_scale"]["value"].fill_(saved.get("scale", state["loss_scale"]["value"]))
        counters = state["loss_scale"]["update_cell"]
        if isinstance(step.loss_scale.update_cell, DynamicLossScaleUpdateCell):
            # Both counters count the steps since the last change of the scale, but torch counts
            # from 0 and MindSpore from 1.
            counters["cur_iter"].fill_(saved.get("_growth_tracker", 0) + 1)
            counters["last_overflow_iter"].zero_()
    return state
