"""Write and read an average's files in a checkpoint folder: its state and the averaged model."""

import json
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, load_model, save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from transformers import PreTrainedModel, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from mfwrap import ExponentialMovingAverage
from mfwrap.arguments import callers_stacklevel, takes
from mfwrap.checkpoints.manifest import MANIFEST
from mfwrap.checkpoints.network_weights import EXPORT, foreign_weights
from mfwrap.checkpoints.run_folders import checkpoints_of_run, step_of_checkpoint
from mfwrap.checkpoints.whole import complete_move, whole_file, whole_folder
from mfwrap.tensors.shards import is_distributed

_STATE = "mfwrap_ema.safetensors"
_WEIGHTS = "mfwrap_weights.safetensors"
_TRAINER_STATE = "trainer_state.json"
_PARTS = ("averages", "buffers", "counters")
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_PART_OF_WHOLE = StateDictOptions(full_state_dict=True, strict=False)


def saved_checkpoint(args: TrainingArguments, state: TrainerState) -> Path | None:
    """Return the checkpoint that a Trainer has just saved; ``None`` if it is not found.

    In a hyperparameter search the Trainer saves into the folder of a trial, and callbacks do not
    get the name of that folder. So this searches the folders of all trials, and returns the newest
    checkpoint that has the step and the log history of `state`.
    """
    if state.is_hyper_param_search:
        return next(_trial_checkpoints(args, state), None)
    folder = Path(args.output_dir or ".") / _name(state)
    return folder if folder.is_dir() else None


def resumed_checkpoint(args: TrainingArguments, state: TrainerState) -> Path | None:
    """Return the checkpoint that a Trainer resumes from; ``None`` if it is not found.

    The Trainer does not pass the checkpoint to callbacks, so this searches
    ``args.resume_from_checkpoint``, the run folder and the folders of trials. A checkpoint of the
    same step with another log history belongs to another run and is ignored.
    """
    given = [Path(args.resume_from_checkpoint)] if args.resume_from_checkpoint else []
    candidates = [*given, Path(args.output_dir or ".") / _name(state)]
    found = (folder for folder in candidates if _is_of(folder, state))
    return next(found, None) or next(_trial_checkpoints(args, state), None)


def save_state(ema: ExponentialMovingAverage, folder: Path) -> None:
    """Write the state of an average into a checkpoint folder."""
    flat = {
        f"{part}/{name}": tensor.detach().contiguous()
        for part, tensors in ema.state_dict().items()
        for name, tensor in tensors.items()
    }
    with whole_file(folder / _STATE) as partial:
        save_file(flat, partial)


def set_aside_states(run_folder: Path, step: int) -> None:
    """Rename the states of averages in checkpoints of later steps to ``<name>.1``, and warn.

    Call it when a training begins in a Trainer that leaves checkpoints of an earlier training where
    they are. Averages of both trainings would otherwise be combined.

    Args:
        run_folder: Run folder.
        step: Step from which the training goes on; 0 for a training from the start.
    """
    later = [
        folder
        for folder in checkpoints_of_run(run_folder)
        # A file that a manifest lists belongs to a Trainer that sets its checkpoints aside itself.
        if step_of_checkpoint(folder) > step
        and has_state(folder)
        and not (folder / MANIFEST).exists()
    ]
    for folder in later:
        (folder / _STATE).replace(folder / f"{_STATE}.1")
    if later:
        names = ", ".join(folder.name for folder in later)
        warnings.warn(
            f"{run_folder} has averages of an earlier training in {names}; they were renamed to "
            f"{_STATE}.1",
            stacklevel=callers_stacklevel(),
        )


def has_state(folder: Path) -> bool:
    """Return whether a checkpoint folder holds the state of an average."""
    return (folder / _STATE).exists()


def read_state(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """Return the state of an average in a checkpoint folder.

    Raises:
        ValueError: If the file is damaged.
    """
    flat = _tensors_of(folder / _STATE, "delete this file to resume without the average")
    state: dict[str, dict[str, torch.Tensor]] = {part: {} for part in _PARTS}
    for full_name, tensor in flat.items():
        part, _, name = full_name.partition("/")
        state.setdefault(part, {})[name] = tensor
    return state


def _tensors_of(path: Path, advice: str) -> dict[str, torch.Tensor]:
    try:
        return load_file(path)
    except SafetensorError as error:
        msg = f"cannot load the average: {path} is damaged ({error}); {advice}"
        raise ValueError(msg) from error


def is_sharded(model: nn.Module) -> bool:
    """Return whether any weight is a distributed tensor."""
    return any(is_distributed(parameter) for parameter in model.parameters())


def export_averages(
    ema: ExponentialMovingAverage, model: nn.Module, folder: Path, *, is_writer: bool
) -> None:
    """Write the model with averaged weights to ``folder/ema``, replacing an older export.

    Args:
        ema: Average of the weights of `model`.
        model: Model to export. If its weights are sharded, every rank must call this.
        folder: Checkpoint folder.
        is_writer: Whether this rank writes.
    """
    with ema.swap():
        gathered = get_model_state_dict(model, options=_WHOLE) if is_sharded(model) else None
        if is_writer:
            with whole_folder(folder / EXPORT) as written:
                _save(model, written, gathered)


def _save(model: nn.Module, folder: Path, gathered: dict[str, Any] | None) -> None:
    save: Any = getattr(model, "save_pretrained", None)
    if save is None or (gathered is not None and not takes(save, "state_dict")):
        _save_weights(model, folder / "model.safetensors", gathered)
        return
    keywords: dict[str, Any] = {} if gathered is None else {"state_dict": gathered}
    if isinstance(model, PreTrainedModel) and takes(save, "save_original_format"):
        # transformers converts some checkpoints when it loads them. By default it saves such a
        # model in the original format, with parameter names that `load_exported` could not load.
        keywords["save_original_format"] = False
    save(str(folder), **keywords)
    if not _can_be_loaded(folder, model):
        # A method of the user's own has saved the model in a form of its own.
        _save_weights(model, folder / _WEIGHTS, gathered)


def _save_weights(model: nn.Module, path: Path, gathered: dict[str, Any] | None) -> None:
    if gathered is None:
        save_model(model, str(path))
    else:
        save_file(gathered, path)


def _can_be_loaded(folder: Path, model: nn.Module) -> bool:
    """Return whether an exported model has the names of the network, or is an adapter."""
    if (folder / "adapter_model.safetensors").exists():
        return True
    return any(folder.glob("model*.safetensors")) and foreign_weights(folder, model) is None


def load_exported(model: nn.Module, checkpoint: Path) -> bool:
    """Load a checkpoint's exported averages into a model; warn if there are no averages.

    Returns:
        Whether there are averages.
    """
    complete_move(checkpoint)
    return load_averages(model, checkpoint / EXPORT)


def load_averages(model: nn.Module, folder: Path) -> bool:
    """Load averaged weights from a folder of a model; warn if there are none.

    Returns:
        Whether there are averages.
    """
    # A large model is split into several files.
    files = sorted(folder.glob("model*.safetensors"))
    adapted: Any = model
    if (folder / "adapter_model.safetensors").exists():
        adapted.load_adapter(str(folder), adapted.active_adapters[0], is_trainable=True)
    elif (folder / _WEIGHTS).exists():
        load_model(model, folder / _WEIGHTS)
    elif files:
        for file in files:
            weights: dict[str, Any] = _tensors_of(file, "load the average of another checkpoint")
            if is_sharded(model):
                set_model_state_dict(model, weights, options=_PART_OF_WHOLE)
            else:
                model.load_state_dict(weights, strict=False)
    else:
        warnings.warn(
            f"{folder} has no averaged weights; the model keeps its raw weights", stacklevel=4
        )
        return False
    return True


def _name(state: TrainerState) -> str:
    return f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _trial_checkpoints(args: TrainingArguments, state: TrainerState) -> Iterator[Path]:
    """Yield trials' checkpoints that have the step and log history of `state`, newest first."""
    states = Path(args.output_dir or ".").glob(f"*/{_name(state)}/{_TRAINER_STATE}")
    newest_first = sorted(states, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return (path.parent for path in newest_first if _is_of(path.parent, state))


def _is_of(folder: Path, state: TrainerState) -> bool:
    path = folder / _TRAINER_STATE
    return path.is_file() and _progress(TrainerState.load_from_json(str(path))) == _progress(state)


def _progress(state: TrainerState) -> str:
    # Compare as text: compared as numbers, two NaNs in the log history would differ.
    return json.dumps([state.global_step, state.log_history], sort_keys=True)
