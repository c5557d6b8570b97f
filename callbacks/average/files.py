"""An average of weights in the folder of a checkpoint: its state, and the model it makes."""

import contextlib
import json
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file, save_model
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from mfwrap import ExponentialMovingAverage
from mfwrap.checkpoints.folders import complete_move, whole_file, whole_folder

__all__ = [
    "EvaluatedAverages",
    "export_averages",
    "is_sharded",
    "load_exported",
    "load_state",
    "resumed_checkpoint",
    "save_state",
    "saved_checkpoint",
]


_EXPORT = "ema"
_STATE = "mfwrap_ema.safetensors"
_TRAINER_STATE = "trainer_state.json"
_WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)
_PART_OF_WHOLE = StateDictOptions(full_state_dict=True, strict=False)
_PARTS = ("averages", "buffers", "counters")


def saved_checkpoint(args: TrainingArguments, state: TrainerState) -> Path | None:
    """Return the checkpoint that a Trainer has just saved; ``None`` if there is none.

    In a hyperparameter search it lies in a folder of the trial, whose name callbacks are not told:
    it is the newest one there with this state.
    """
    if state.is_hyper_param_search:
        return next(_of_trials(args, state), None)
    folder = Path(args.output_dir or ".") / _name(state)
    return folder if folder.is_dir() else None


def resumed_checkpoint(args: TrainingArguments, state: TrainerState) -> Path | None:
    """Return the checkpoint that a Trainer has taken its state from; ``None`` if it is not found.

    Callbacks are not told that either. Looked at are ``args.resume_from_checkpoint``, the run's
    folder and the trials' ones. A checkpoint of the same step with another log is of another run.
    """
    told = args.resume_from_checkpoint
    given = [Path(told)] if told else []
    near = [*given, Path(args.output_dir or ".") / _name(state)]
    found = (folder for folder in near if _is_of(folder, state))
    return next(found, None) or next(_of_trials(args, state), None)


def save_state(ema: ExponentialMovingAverage, folder: Path) -> None:
    """Write the state of an average."""
    flat = {
        f"{part}/{name}": tensor.detach().contiguous()
        for part, tensors in ema.state_dict().items()
        for name, tensor in tensors.items()
    }
    with whole_file(folder / _STATE) as partial:
        save_file(flat, partial)


def load_state(ema: ExponentialMovingAverage, folder: Path) -> bool:
    """Load the state of an average; nothing is changed if it does not fit.

    Returns:
        Whether the checkpoint holds one.

    Raises:
        KeyError: If a name is missing or unknown.
        ValueError: If the file cannot be read, or a shape does not fit.
    """
    path = folder / _STATE
    if not path.exists():
        return False
    try:
        flat = load_file(path)
    except SafetensorError as error:
        msg = f"`{path}` must be whole, got a file that cannot be read: {error}"
        raise ValueError(msg) from error
    state: dict[str, dict[str, torch.Tensor]] = {part: {} for part in _PARTS}
    for full_name, tensor in flat.items():
        part, _, name = full_name.partition("/")
        state.setdefault(part, {})[name] = tensor
    ema.load_state_dict(state)
    return True


def is_sharded(model: nn.Module) -> bool:
    """Return whether any weight is distributed over ranks."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def export_averages(
    ema: ExponentialMovingAverage, model: nn.Module, folder: Path, *, is_writer: bool
) -> None:
    """Write the model with averaged weights into ``folder/ema``, replaced as a whole.

    Args:
        ema: Whose averages.
        model: That they are of. If it is sharded, every rank calls this.
        folder: Of the checkpoint.
        is_writer: Whether this rank writes.
    """
    with ema.swap():
        gathered = get_model_state_dict(model, options=_WHOLE) if is_sharded(model) else None
        if is_writer:
            with whole_folder(folder / _EXPORT) as written:
                _save(model, written, gathered)


def _save(model: nn.Module, folder: Path, gathered: dict[str, Any] | None) -> None:
    saves_itself: Any = model
    if isinstance(model, PreTrainedModel):
        # Under the network's own names, under which the best one is loaded again.
        saves_itself.save_pretrained(folder, state_dict=gathered, save_original_format=False)
    elif hasattr(model, "save_pretrained"):
        saves_itself.save_pretrained(folder, state_dict=gathered)
    else:
        path = folder / "model.safetensors"
        if gathered is None:
            save_model(model, str(path))
        else:
            save_file(gathered, path)


def load_exported(model: nn.Module, checkpoint: Path) -> None:
    """Load the averaged weights that a checkpoint holds, or warn that it holds none."""
    complete_move(checkpoint)
    folder = checkpoint / _EXPORT
    # Large models are written in several files.
    files = sorted(folder.glob("model*.safetensors"))
    adapted: Any = model
    if (folder / "adapter_model.safetensors").exists():
        adapted.load_adapter(str(folder), adapted.active_adapters[0], is_trainable=True)
    elif files:
        for file in files:
            weights: dict[str, Any] = load_file(file)
            if is_sharded(model):
                set_model_state_dict(model, weights, options=_PART_OF_WHOLE)
            else:
                model.load_state_dict(weights, strict=False)
    else:
        warnings.warn(
            f"no averaged weights in {folder}: the model keeps the raw ones", stacklevel=3
        )


def _name(state: TrainerState) -> str:
    return f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"


def _of_trials(args: TrainingArguments, state: TrainerState) -> Iterator[Path]:
    """Yield checkpoints of this state in folders of trials, the newest first."""
    states = Path(args.output_dir or ".").glob(f"*/{_name(state)}/{_TRAINER_STATE}")
    newest_first = sorted(states, key=lambda path: path.stat().st_mtime_ns, reverse=True)
    return (path.parent for path in newest_first if _is_of(path.parent, state))


def _is_of(folder: Path, state: TrainerState) -> bool:
    path = folder / _TRAINER_STATE
    return path.is_file() and _progress(TrainerState.load_from_json(str(path))) == _progress(state)


def _progress(state: TrainerState) -> str:
    # As text, in which a NaN equals a NaN.
    return json.dumps([state.global_step, state.log_history], sort_keys=True)


@final
class EvaluatedAverages:
    """Hold averages in a model from before an evaluation until it is over.

    A Trainer says when one dataset has been evaluated, and not whether another one follows. So
    with several of them the averages stay until the model is next saved, loaded or trained;
    ``state_dict`` and ``load_state_dict`` of the model put the raw weights back first.
    """

    def __init__(self) -> None:
        self._swap = contextlib.ExitStack()
        self._hooks = contextlib.ExitStack()
        self._control: TrainerControl | None = None
        self._step: int | None = None
        self._are_held = False

    def hold(
        self, ema: ExponentialMovingAverage, model: nn.Module, step: int, control: TrainerControl
    ) -> None:
        """Write the averages into the model, for the evaluation of a step that comes now.

        Args:
            ema: Whose averages.
            model: That is evaluated.
            step: Updates so far.
            control: Says whether an evaluation is still due; the Trainer takes that back when the
                first dataset has been evaluated.
        """
        self.end()
        self._swap.enter_context(ema.swap())
        before_saving = model.register_state_dict_pre_hook(self._before_saving)
        before_loading = model.register_load_state_dict_pre_hook(self._before_loading)
        self._hooks.callback(before_saving.remove)
        self._hooks.callback(before_loading.remove)
        self._are_held, self._control, self._step = True, control, step

    def put_back(self) -> None:
        """Put the raw weights back, if averages are held."""
        # The hooks stay: one of them may be what calls this, and torch is going through them.
        self._are_held = False
        self._swap.close()

    def end(self) -> None:
        """Put the raw weights back: no more dataset is evaluated at this step."""
        self.put_back()
        self._hooks.close()
        self._step = None

    def evaluated(self, metrics: Mapping[str, Any] | None, step: int) -> bool:
        """Put the raw weights back if the dataset that was evaluated is the only one.

        Args:
            metrics: Of the dataset. Those of one among several bear its name.
            step: Updates so far.

        Returns:
            Whether it saw what it should have; ``False`` if the raw weights have been put back
            before a dataset of the same evaluation.
        """
        saw_averages = self._are_held or self._step != step
        times = [name for name in metrics or () if name.endswith("_runtime")]
        if not times or "eval_runtime" in times:
            self.end()
        return saw_averages

    def _before_saving(self, *_: Any) -> None:
        # What evaluates the first dataset may itself ask for the state, and is to get averages.
        if self._control is None or not self._control.should_evaluate:
            self.put_back()

    def _before_loading(self, *_: Any) -> None:
        self.put_back()
