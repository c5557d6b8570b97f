"""Evaluation, choice of the best model and export with averaged weights."""

import warnings
from pathlib import Path
from typing import Any, final

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from mfwrap import ExponentialMovingAverage, StepReport
from mfwrap.arguments import check_bool
from mfwrap.callbacks.average.files import (
    EvaluatedAverages,
    export_averages,
    is_sharded,
    load_exported,
    load_state,
    resumed_checkpoint,
    save_state,
    saved_checkpoint,
)

__all__ = [
    "AppliedUpdates",
    "EMACallback",
]


@final
class EMACallback(TrainerCallback):
    """Evaluate, choose and export a model by the average of its weights.

    In an `MFTrainer` with ``ema=`` it uses that average. Otherwise, and in a stock ``Trainer``, it
    keeps one of its own, which follows applied updates, begins anew with each training that is not
    resumed, and is saved with each checkpoint: as a part of it in an `MFTrainer`, beside what is
    there already in a stock one.

    - Evaluations that the Trainer does while it trains see the averaged weights, with
      ``args.eval_on_start`` the first one too, and so does its choice of the best model.
    - ``trainer.evaluate()`` and ``trainer.predict()`` see the model's weights as they are; put them
      into ``with callback.ema.swap():``.
    - ``checkpoint-*/ema`` holds the model with averaged weights, for ``from_pretrained`` (a plain
      module's: ``model.safetensors`` alone).
    - With ``args.load_best_model_at_end``, the model ends with the averaged weights of the best
      checkpoint. Otherwise it ends with its raw ones; ``callback.ema.copy_to()`` changes that.

    A callback that asks for an evaluation of its own has to stand before this one. With several
    evaluation datasets callbacks find the averages in the model until it is saved, loaded or
    trained again. No step waits for the device because of it.

    Args:
        decay: Of an average of its own, in [0, 1); 0.999 by default.
        warmup: Of an average of its own, as in `ExponentialMovingAverage`; ``False`` by default.
        update_every: Of an average of its own, as in `ExponentialMovingAverage`; 1 by default.
        evaluate: Evaluate with averaged weights.
        export: Write ``checkpoint-*/ema``.
        load_best: End with the averaged weights of the best checkpoint; by default if `evaluate`
            and `export` are given.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a setting is out of range, or `load_best` lacks `evaluate` or `export`. At
            the begin of a training, if settings of an average are given and the Trainer has one, if
            there is another `EMACallback`, or if weights are sharded over ranks and the Trainer has
            no average.
    """

    def __init__(
        self,
        decay: float | None = None,
        *,
        warmup: bool | None = None,
        update_every: int | None = None,
        evaluate: bool = True,
        export: bool = True,
        load_best: bool | None = None,
    ) -> None:
        settings = {"decay": decay, "warmup": warmup, "update_every": update_every}
        self._settings: dict[str, Any] = {k: v for k, v in settings.items() if v is not None}
        # What an average would say of them in the middle of a run, it says now.
        ExponentialMovingAverage([torch.zeros(())], **self._settings)
        check_bool("evaluate", evaluate)
        check_bool("export", export)
        if load_best is not None:
            check_bool("load_best", load_best)
        if load_best and not (evaluate and export):
            msg = (
                "`load_best` must go with `evaluate` and `export`, which choose and keep what is "
                f"loaded, got evaluate={evaluate}, export={export}"
            )
            raise ValueError(msg)
        self.ema: ExponentialMovingAverage | None = None
        """The average in use; ``None`` before training has begun."""
        self._evaluates = evaluate
        self._exports = export
        self._loads_best = evaluate and export if load_best is None else load_best
        self._is_own = False
        self._updates: AppliedUpdates | None = None
        self._evaluated = EvaluatedAverages()
        self._resumed_from: Path | None = None
        self._is_saved = False

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
        self._evaluated.end()
        self._stop_watching()
        self._is_saved = False
        resumed_from, self._resumed_from = self._resumed_from, None
        self._refuse_another(state)
        attachment = getattr(optimizer, "attachment", None)
        of_trainer = getattr(attachment, "ema", None)
        self._is_own = of_trainer is None
        if of_trainer is not None:
            self._refuse_settings()
            self.ema = of_trainer
        else:
            self.ema = self._own_average(model)
            if state.global_step > 0:
                self._resume(self.ema, resumed_from or resumed_checkpoint(args, state))
            if attachment is None:
                self._updates = AppliedUpdates(optimizer)
        if self._evaluates and args.eval_on_start:
            self._evaluated.hold(self.ema, model, state.global_step, control)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Train the raw weights: evaluations that were asked for are over."""
        del args, state, control
        self._evaluated.end()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        step_report: StepReport | None = None,
        **_: Any,
    ) -> None:
        """Follow the update; hold the averages in the model if an evaluation comes."""
        del args
        if self.ema is not None and self._is_own:
            self.ema.update(self._applied(step_report))
        self._prepare_evaluation(state, control, model)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: Any,
    ) -> None:
        """Hold the averages in the model if an evaluation comes."""
        del args
        self._evaluated.end()
        self._prepare_evaluation(state, control, model)

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Any = None,
        **_: Any,
    ) -> None:
        """Put the raw weights back if the evaluation is over."""
        del args, control
        if not self._evaluated.evaluated(metrics, state.global_step):
            warnings.warn(
                "an evaluation saw raw weights: the model's state was asked for between two "
                "datasets, which puts them back",
                stacklevel=2,
            )

    def save_into(self, folder: Path, args: TrainingArguments, model: nn.Module) -> None:
        """Write the average's state and the averaged model into a checkpoint.

        An `MFTrainer` calls it on every rank while the checkpoint is not yet in place; then
        `on_save` has nothing left to do.
        """
        self._evaluated.end()
        self._is_saved = True
        if self.ema is not None:
            self._write(self.ema, folder, model, is_writer=args.should_save)

    def resume_from(self, folder: Path) -> None:
        """Hear which checkpoint the training that begins is resumed from; by an `MFTrainer`."""
        self._resumed_from = folder

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: Any,
    ) -> None:
        """Write what `save_into` has not written, beside what a stock Trainer has."""
        del control
        self._evaluated.end()
        is_saved, self._is_saved = self._is_saved, False
        if is_saved or self.ema is None or not args.should_save:
            return
        folder = saved_checkpoint(args, state)
        if folder is None:
            warnings.warn(f"no checkpoint of step {state.global_step} to save in", stacklevel=2)
        else:
            self._write(self.ema, folder, model, is_writer=True)

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
        self._evaluated.end()
        self._stop_watching()
        best = state.best_model_checkpoint
        if self._loads_best and args.load_best_model_at_end and best:
            load_exported(model, Path(best))

    def put_weights_back(self) -> None:
        """Put the raw weights back, if an evaluation holds the averages in the model."""
        self._evaluated.end()

    def _own_average(self, model: nn.Module) -> ExponentialMovingAverage:
        if is_sharded(model):
            msg = (
                "`model` must be whole on each rank for EMACallback to keep an average of its own, "
                "got weights that are sharded over ranks; give the Trainer one (`ema`)"
            )
            raise ValueError(msg)
        return ExponentialMovingAverage(model, **self._settings)

    def _resume(self, ema: ExponentialMovingAverage, checkpoint: Path | None) -> None:
        if checkpoint is None or not load_state(ema, checkpoint):
            place = "the checkpoint that is resumed was not found" if checkpoint is None else ""
            warnings.warn(
                f"no average: {place or f'none in {checkpoint}'}; it starts from the weights that "
                "are loaded",
                stacklevel=3,
            )

    def _refuse_settings(self) -> None:
        if self._settings:
            given = ", ".join(f"{name}={value}" for name, value in self._settings.items())
            names = ", ".join(f"`{name}`" for name in self._settings)
            msg = f"{names} must be None where the Trainer has an average of its own, got {given}"
            raise ValueError(msg)

    def _refuse_another(self, state: TrainerState) -> None:
        # A training has a state of its own, which all its callbacks see and which is saved by its
        # fields alone.
        if vars(state).setdefault("ema_callback", self) is not self:
            msg = (
                "a Trainer must have one EMACallback at most, got two: each would take the "
                "averages that the other one holds in the model for the weights"
            )
            raise ValueError(msg)

    def _applied(self, report: StepReport | None) -> Tensor | None:
        if report is not None:
            return ~report.skipped
        return None if self._updates is None else self._updates.last()

    def _stop_watching(self) -> None:
        if self._updates is not None:
            self._updates.close()
            self._updates = None

    def _prepare_evaluation(
        self, state: TrainerState, control: TrainerControl, model: nn.Module
    ) -> None:
        if self._evaluates and self.ema is not None and control.should_evaluate:
            self._evaluated.hold(self.ema, model, state.global_step, control)

    def _write(
        self, ema: ExponentialMovingAverage, folder: Path, model: nn.Module, *, is_writer: bool
    ) -> None:
        if self._is_own and is_writer:
            save_state(ema, folder)
        if self._exports and (is_writer or is_sharded(model)):
            export_averages(ema, model, folder, is_writer=is_writer)


@final
class AppliedUpdates:
    """Tell whether the last update was applied, in a loop that has no step's report.

    In fp16 a gradient scaler leaves out updates. It does not call the optimizer then, or, if that
    is a fused one, calls it with the flag ``found_inf`` on the device. A hook on the optimizer sees
    both: it notes the call and derives a flag of its own; nothing waits for the device. (Asking
    ``GradScaler.get_scale`` waits at every step, and accelerate's ``step_was_skipped`` denies the
    skip of a fused optimizer.)

    An optimizer that is none of torch's own kind (DeepSpeed's) is asked for ``step_was_skipped``.

    Args:
        optimizer: As a Trainer hands it to callbacks, in accelerate's wrapper or not. ``None``:
            all updates count as applied.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._was_called = False
        self._applied: Tensor | None = None
        inner = optimizer
        while isinstance(inner, AcceleratedOptimizer):
            inner = inner.optimizer
        self._handle: Any = None
        if isinstance(inner, torch.optim.Optimizer):
            # Before the update: the scaler takes its flag away after it.
            self._handle = inner.register_step_pre_hook(self._note)

    def last(self) -> Tensor | None:
        """Return whether the update since the last call was applied; does not wait.

        Returns:
            Of shape ``()``, bool; ``None`` says that it was.
        """
        if self._handle is None:
            was_skipped = bool(getattr(self._optimizer, "step_was_skipped", False))
            return torch.zeros((), dtype=torch.bool) if was_skipped else None
        was_called, self._was_called = self._was_called, False
        applied, self._applied = self._applied, None
        return applied if was_called else torch.zeros((), dtype=torch.bool)

    def close(self) -> None:
        """Take the hook off the optimizer."""
        if self._handle is not None:
            self._handle.remove()

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._was_called = True
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        self._applied = None if found_inf is None else found_inf.reshape(()) == 0
