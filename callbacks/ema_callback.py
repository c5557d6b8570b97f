"""Evaluation, choice of the best model and export with averaged weights."""

import contextlib
import shutil
from pathlib import Path
from typing import Any, final

import torch
from safetensors.torch import load_file, save_file
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

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
        self._is_own = False
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
        decay = 0.999 if self._decay is None else self._decay
        self.ema = ExponentialMovingAverage(model, decay, **self._settings)
        saved = _checkpoint(args, state) / _STATE
        if saved.exists():
            self.ema.load_state_dict(_nested(load_file(saved)))

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
        del args, state
        if self.ema is not None and self._is_own:
            self.ema.update(_applied(optimizer, step_report))
        self._prepare_evaluation(control)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Hold the averages in the model if an evaluation comes."""
        del args, state
        self._prepare_evaluation(control)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Put the raw weights back."""
        del args, state, control
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
        folder = _checkpoint(args, state)
        if self.ema is None or not folder.is_dir() or not state.is_world_process_zero:
            return
        if self._is_own:
            save_file(_flat(self.ema.state_dict()), folder / _STATE)
        if not self._exports:
            return
        # Beside first, so that what bears the name is whole.
        written, final_place = folder / f"{_FOLDER}.partial", folder / _FOLDER
        shutil.rmtree(written, ignore_errors=True)
        with self.ema.swap():
            model.save_pretrained(written)
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
        best = state.best_model_checkpoint
        if not (self._loads_best and args.load_best_model_at_end and best):
            return
        weights = Path(best) / _FOLDER / "model.safetensors"
        if weights.exists():
            model.load_state_dict(load_file(weights), strict=False)

    def _prepare_evaluation(self, control: TrainerControl) -> None:
        if self._evaluates and self.ema is not None and control.should_evaluate:
            self._swap.enter_context(self.ema.swap())


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(args.output_dir or ".") / f"checkpoint-{state.global_step}"


def _applied(optimizer: Any, report: StepReport | None) -> torch.Tensor | None:
    if report is not None:
        return ~report.skipped
    skipped = getattr(optimizer, "step_was_skipped", False)
    return torch.zeros((), dtype=torch.bool) if skipped else None


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
