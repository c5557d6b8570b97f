"""Evaluation, choice of the best model and export with averaged weights."""

import contextlib
import shutil
import warnings
from pathlib import Path
from typing import Any, final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import (
    PreTrainedModel,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from mfwrap import ExponentialMovingAverage, StepReport

__all__ = ["EMACallback"]

_FOLDER = "ema"
_STATE = "mfwrap_ema.safetensors"


@final
class EMACallback(TrainerCallback):
    """Evaluate, choose and export a model by the average of its weights.

    In an `MFTrainer` with ``ema=`` it uses that average. Otherwise, and in a stock ``Trainer``, it
    keeps one of its own, which follows applied updates and is saved with each checkpoint.

    - Evaluations that the Trainer does while it trains see the averaged weights, and so does its
      choice of the best model. ``trainer.evaluate()`` does not; put it into ``with ema.swap():``.
    - ``checkpoint-*/ema`` holds the model with averaged weights, for ``from_pretrained``.
    - With ``args.load_best_model_at_end``, the model ends with the averaged weights of the best
      checkpoint.

    A callback that asks for an evaluation of its own has to stand before this one.

    Args:
        decay: Of an average of its own; 0.999 by default.
        warmup: As in `ExponentialMovingAverage`.
        update_every: As in `ExponentialMovingAverage`.
        evaluate: Evaluate with averaged weights.
        export: Write ``checkpoint-*/ema``.
        load_best: End with the averaged weights of the best checkpoint.
        num_eval_datasets: Evaluations that one evaluation of the Trainer consists of: the length of
            ``eval_dataset`` if that is a dict.

    Raises:
        ValueError: If `load_best` lacks `evaluate` or `export`; at the begin of a training if
            `decay` is given and the Trainer has an average.
    """

    def __init__(
        self,
        decay: float | None = None,
        *,
        warmup: bool = False,
        update_every: int = 1,
        evaluate: bool = True,
        export: bool = True,
        load_best: bool | None = None,
        num_eval_datasets: int = 1,
    ) -> None:
        if load_best and not (evaluate and export):
            msg = (
                "`load_best` must go with `evaluate` and `export`, which choose and keep what is "
                f"loaded, got evaluate={evaluate}, export={export}"
            )
            raise ValueError(msg)
        self.ema: ExponentialMovingAverage | None = None
        """The average in use; ``None`` before training has begun."""
        self._decay = decay
        self._settings: dict[str, Any] = {"warmup": warmup, "update_every": update_every}
        self._evaluates = evaluate
        self._exports = export
        self._loads_best = evaluate and export if load_best is None else load_best
        self._num_eval_datasets = num_eval_datasets
        self._num_evaluations = 0
        self._prepared_step: int | None = None
        self._is_own = False
        self._scale: float | None = None
        self._swap = contextlib.ExitStack()

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Find the Trainer's average, or make one."""
        del control
        self._swap.close()
        of_trainer = getattr(getattr(optimizer, "attachment", None), "ema", None)
        self._is_own = of_trainer is None
        if of_trainer is not None and self._decay is not None:
            msg = f"`decay` must be None where the Trainer has an average, got {self._decay}"
            raise ValueError(msg)
        if of_trainer is not None:
            self.ema = of_trainer
            return
        scaler = getattr(optimizer, "scaler", None)
        self._scale = None if scaler is None else scaler.get_scale()
        decay = 0.999 if self._decay is None else self._decay
        self.ema = ExponentialMovingAverage(model, decay, **self._settings)
        saved = _checkpoint(args, state) / _STATE
        if saved.exists():
            self.ema.load_state_dict(_nested(_read(saved)))
        elif state.global_step > 0:
            warnings.warn(
                f"no average in {saved.parent}: it starts from the weights that are loaded",
                stacklevel=2,
            )

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Forget evaluations: those that were asked for are over."""
        del args, state, control
        self._prepared_step = None

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        optimizer: Any = None,
        step_report: StepReport | None = None,
        **_: Any,
    ) -> None:
        """Follow the update; hold the averages in the model if an evaluation comes."""
        del args
        if self.ema is not None and self._is_own:
            self.ema.update(self._applied(optimizer, step_report))
        self._prepare_evaluation(state, control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Hold the averages in the model if an evaluation comes."""
        del args
        self._prepare_evaluation(state, control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Put the raw weights back after the last of the evaluations."""
        del args, control
        if self._num_evaluations == 0 and self._prepared_step == state.global_step:
            warnings.warn(
                "an evaluation saw raw weights; set `num_eval_datasets` of EMACallback to the "
                "number of datasets",
                stacklevel=2,
            )
        self._num_evaluations -= 1
        if self._num_evaluations <= 0:
            self._swap.close()

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: Any,
    ) -> None:
        """Write the model with averaged weights into the checkpoint."""
        del control
        self._prepared_step = None
        folder = _checkpoint(args, state)
        if self.ema is None or not folder.is_dir() or not state.is_world_process_zero:
            return
        if self._is_own:
            save_file(_flat(self.ema.state_dict()), folder / f"{_STATE}.partial")
            (folder / f"{_STATE}.partial").rename(folder / _STATE)
        if not self._exports:
            return
        # Beside first, so that what bears the name is whole.
        written, final_place = folder / f"{_FOLDER}.partial", folder / _FOLDER
        shutil.rmtree(written, ignore_errors=True)
        with self.ema.swap():
            # Under the network's own names, under which the best one is loaded again.
            own_names = isinstance(model, PreTrainedModel)
            model.save_pretrained(written, **{"save_original_format": False} if own_names else {})
        shutil.rmtree(final_place, ignore_errors=True)
        written.rename(final_place)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: Any,
    ) -> None:
        """Load the averaged weights of the best checkpoint, if the Trainer has loaded it."""
        del control
        self._swap.close()
        self._prepared_step = None
        best = state.best_model_checkpoint
        if not (self._loads_best and args.load_best_model_at_end and best):
            return
        folder = Path(best) / _FOLDER
        if (folder / "model.safetensors").exists():
            model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        elif (folder / "adapter_model.safetensors").exists():
            model.load_adapter(str(folder), model.active_adapters[0], is_trainable=True)
        else:
            warnings.warn(
                f"no averaged weights in one file in {folder}: the model keeps the raw ones",
                stacklevel=2,
            )

    def _applied(self, optimizer: Any, report: StepReport | None) -> torch.Tensor | None:
        if report is not None:
            return ~report.skipped
        # accelerate denies a skip of a fused optimizer; its scaler, if there is one, does not.
        scaler = getattr(optimizer, "scaler", None)
        before, self._scale = self._scale, None if scaler is None else scaler.get_scale()
        fell = before is not None and self._scale is not None and self._scale < before
        skipped = fell or getattr(optimizer, "step_was_skipped", False)
        return torch.zeros((), dtype=torch.bool) if skipped else None

    def put_weights_back(self) -> None:
        """Put the raw weights back, if an evaluation holds the averages in the model."""
        self._swap.close()

    def _prepare_evaluation(self, state: TrainerState, control: TrainerControl) -> None:
        if self._evaluates and self.ema is not None and control.should_evaluate:
            self._swap.enter_context(self.ema.swap())
            self._num_evaluations = self._num_eval_datasets
            self._prepared_step = state.global_step


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        tensors: dict[str, torch.Tensor] = load_file(path)
    except SafetensorError as error:
        msg = f"`{path}` must be whole, got a file that cannot be read: {error}"
        raise ValueError(msg) from error
    return tensors


def _flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {
        f"{part}/{name}": tensor.detach().contiguous()
        for part, tensors in state.items()
        for name, tensor in tensors.items()
    }


def _nested(flat: dict[str, torch.Tensor]) -> dict[str, dict[str, torch.Tensor]]:
    state: dict[str, dict[str, torch.Tensor]] = {"averages": {}, "buffers": {}, "counters": {}}
    for path, tensor in flat.items():
        part, _, name = path.partition("/")
        state[part][name] = tensor
    return state
