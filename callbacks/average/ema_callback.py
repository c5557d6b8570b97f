"""Evaluate, choose the best model, and export with averaged weights."""

import contextlib
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from mfwrap import ExponentialMovingAverage, StepReport
from mfwrap.arguments import check_bool
from mfwrap.callbacks.average.files import (
    export_averages,
    is_sharded,
    load_exported,
    load_state,
    resumed_checkpoint,
    save_state,
    saved_checkpoint,
)
from mfwrap.tensors.wrappers import unwrapped_optimizer
from mfwrap.trainer import MonitorCallback


@final
class EMACallback(MonitorCallback):
    """Evaluate a model, choose the best checkpoint, and export with averaged weights.

    In an `MFTrainer` with ``ema=`` the callback uses the Trainer's average. Otherwise, and in a
    stock ``Trainer``, it keeps its own average. That average follows applied updates only, starts
    over with each training that is not resumed, and is saved with each checkpoint. An `MFTrainer`
    lists its files in the manifest of the checkpoint; a stock Trainer gets extra files.

    - Evaluations during training use the averaged weights, with ``args.eval_on_start`` also the
      first one. So does the choice of the best checkpoint.
    - ``trainer.evaluate()`` and ``trainer.predict()`` use the model's current weights; to use the
      averages, call them inside ``with callback.ema.swap():``.
    - ``checkpoint-*/ema`` holds the model with averaged weights, for ``from_pretrained``. For a
      plain ``nn.Module`` it holds ``model.safetensors`` only.
    - With ``args.load_best_model_at_end``, the model ends with the averaged weights of the best
      checkpoint. Otherwise it ends with its raw weights; ``callback.ema.copy_to()`` replaces them
      with the averages.

    Place any callback that requests an evaluation before this one. With several evaluation data
    sets, callbacks find the averages in the model until it is saved, loaded or trained again. The
    callback adds no host-device synchronization to a step.

    Args:
        decay: Decay of the callback's own average, in [0, 1); 0.999 by default.
        warmup: Warm-up of the callback's own average, see `ExponentialMovingAverage`; ``False`` by
            default.
        update_every: Stride of the callback's own average, see `ExponentialMovingAverage`; 1 by
            default.
        evaluate: Evaluate with averaged weights.
        export: Write ``checkpoint-*/ema``.
        load_best: End with the averaged weights of the best checkpoint. By default on if
            `evaluate` and `export` are on.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a setting is out of range, or `load_best` is on without `evaluate` and
            `export`. At the start of training: if `decay`, `warmup` or `update_every` is given
            but the Trainer has an average, if the Trainer has two `EMACallback`, or if weights are
            sharded and the Trainer has no average.
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
        # Checks the settings now, and not when the training begins.
        ExponentialMovingAverage([torch.zeros(())], **self._settings)
        check_bool("evaluate", evaluate)
        check_bool("export", export)
        if load_best is not None:
            check_bool("load_best", load_best)
        if load_best and not (evaluate and export):
            msg = (
                "`load_best` needs evaluate=True and export=True, got "
                f"evaluate={evaluate}, export={export}"
            )
            raise ValueError(msg)
        self.ema: ExponentialMovingAverage | None = None
        """The average in use; ``None`` before training begins."""
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
        """Take the Trainer's average, or make one."""
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
        """Restore the raw weights before the step trains them."""
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
        """Update the average; put it into the model if an evaluation follows."""
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
        """Put the averages into the model if an evaluation follows."""
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
        """Restore the raw weights after the evaluation of a single data set."""
        del args, control
        if not self._evaluated.evaluated(metrics, state.global_step):
            warnings.warn(
                "a data set was evaluated with raw weights: something called the model's "
                "state_dict between two data sets, which restores the raw weights",
                stacklevel=2,
            )

    def save_into(self, folder: Path, args: TrainingArguments, model: nn.Module) -> None:
        """Write the average's state and the averaged model into an unfinished checkpoint.

        An `MFTrainer` calls this on every rank before it renames the checkpoint to its final name.
        `on_save` then writes nothing.
        """
        self._evaluated.end()
        self._is_saved = True
        if self.ema is not None:
            self._write(self.ema, folder, model, is_writer=args.should_save)

    def resume_from(self, folder: Path) -> None:
        """Take the average from this checkpoint when training begins; called by an `MFTrainer`."""
        self._resumed_from = folder

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: Any,
    ) -> None:
        """Write into the checkpoint of a stock Trainer, which does not call `save_into`."""
        del control
        self._evaluated.end()
        is_saved, self._is_saved = self._is_saved, False
        if is_saved or self.ema is None or not args.should_save:
            return
        folder = saved_checkpoint(args, state)
        if folder is None:
            warnings.warn(
                f"cannot save the average: the checkpoint of step {state.global_step} was not "
                f"found in {args.output_dir}",
                stacklevel=2,
            )
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
        """Restore the raw weights if an interrupted evaluation left averages in the model."""
        self._evaluated.end()

    def _own_average(self, model: nn.Module) -> ExponentialMovingAverage:
        if is_sharded(model):
            msg = (
                "EMACallback cannot average weights that are sharded over ranks; give the Trainer "
                "an average instead: MFTrainer(..., ema=...)"
            )
            raise ValueError(msg)
        return ExponentialMovingAverage(model, **self._settings)

    def _resume(self, ema: ExponentialMovingAverage, checkpoint: Path | None) -> None:
        if checkpoint is None or not load_state(ema, checkpoint):
            reason = (
                "the checkpoint to resume from was not found"
                if checkpoint is None
                else f"{checkpoint} has no average"
            )
            warnings.warn(
                f"the average could not be resumed: {reason}. It restarts from the loaded weights",
                stacklevel=3,
            )

    def _refuse_settings(self) -> None:
        if self._settings:
            given = ", ".join(f"{name}={value}" for name, value in self._settings.items())
            msg = (
                f"EMACallback got {given}, but the Trainer has an average with settings of its "
                "own; leave these arguments out"
            )
            raise ValueError(msg)

    def _refuse_another(self, state: TrainerState) -> None:
        # All callbacks of a training share `state`, and the Trainer saves only its declared fields.
        # So an extra attribute detects a second EMACallback. While the first one holds averages in
        # the model for an evaluation, the second one would average them instead of the weights.
        if vars(state).setdefault("ema_callback", self) is not self:
            msg = "a Trainer can have only one EMACallback, got two; remove one of them"
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
class EvaluatedAverages:
    """Hold averaged weights in a model while a Trainer evaluates it.

    With a single data set, the raw weights are restored as soon as it has been evaluated. With
    several data sets, the Trainer does not say which is the last. The averages then stay in the
    model until the caller calls `end`, or until the model's ``state_dict`` or ``load_state_dict``
    is called: hooks on both restore the raw weights first.
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
        """Put the averages into the model for the evaluation that follows.

        Args:
            ema: Average of the weights of `model`.
            model: Model that is evaluated.
            step: Number of updates so far.
            control: Control of the Trainer. Its ``should_evaluate`` turns false when the first data
                set has been evaluated.
        """
        self.end()
        self._swap.enter_context(ema.swap())
        before_saving = model.register_state_dict_pre_hook(self._before_saving)
        before_loading = model.register_load_state_dict_pre_hook(self._before_loading)
        self._hooks.callback(before_saving.remove)
        self._hooks.callback(before_loading.remove)
        self._are_held, self._control, self._step = True, control, step

    def put_back(self) -> None:
        """Restore the raw weights if averages are held; the hooks stay until `end`."""
        # The hooks call this while torch iterates over the model's hooks. Removing a hook here
        # would change that dict and could end the iteration with a RuntimeError.
        self._are_held = False
        self._swap.close()

    def end(self) -> None:
        """End the evaluation: restore the raw weights and remove the hooks."""
        self.put_back()
        self._hooks.close()
        self._step = None

    def evaluated(self, metrics: Mapping[str, Any] | None, step: int) -> bool:
        """Handle the end of a data set's evaluation; restore the raw weights after a single one.

        Args:
            metrics: Metrics of the data set. ``eval_runtime`` means that it is the only data set;
                one of several data sets has ``eval_<data set>_runtime``.
            step: Number of updates so far.

        Returns:
            False if averages were put into the model for this evaluation, but the raw weights were
            restored before this data set was evaluated. Otherwise True, also if the evaluation was
            meant to use raw weights.
        """
        saw_averages = self._are_held or self._step != step
        times = [name for name in metrics or () if name.endswith("_runtime")]
        if not times or "eval_runtime" in times:
            self.end()
        return saw_averages

    def _before_saving(self, *_: Any) -> None:
        # While the evaluation is still due, the caller is the evaluation itself: it gets averages.
        if self._control is None or not self._control.should_evaluate:
            self.put_back()

    def _before_loading(self, *_: Any) -> None:
        self.put_back()


@final
class AppliedUpdates:
    """Tell whether the last update was applied, in a loop without a step report.

    In fp16 a gradient scaler skips updates: it does not call the optimizer, or, if the optimizer is
    fused, calls it with the flag ``found_inf`` on the device. A hook on the optimizer notes the
    call and copies the flag, without host-device synchronization. (The alternatives are worse:
    ``GradScaler.get_scale`` synchronizes at every step, and accelerate's ``step_was_skipped`` is
    always false for a fused optimizer.)

    An optimizer that is not a ``torch.optim.Optimizer`` (DeepSpeed) is asked for
    ``step_was_skipped``.

    Args:
        optimizer: Optimizer as the Trainer passes it to callbacks, with or without accelerate's
            wrapper. With ``None`` all updates count as applied.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._was_called = False
        self._applied: Tensor | None = None
        inner = unwrapped_optimizer(optimizer)
        self._handle: Any = None
        if isinstance(inner, torch.optim.Optimizer):
            # A hook before the update: the scaler removes `found_inf` after it.
            self._handle = inner.register_step_pre_hook(self._note)

    def last(self) -> Tensor | None:
        """Return whether the update since the last call was applied, without synchronization.

        Returns:
            Shape ``()``, bool. ``None`` means that the update was certainly applied.
        """
        if self._handle is None:
            was_skipped = bool(getattr(self._optimizer, "step_was_skipped", False))
            return torch.zeros((), dtype=torch.bool) if was_skipped else None
        was_called, self._was_called = self._was_called, False
        applied, self._applied = self._applied, None
        return applied if was_called else torch.zeros((), dtype=torch.bool)

    def close(self) -> None:
        """Remove the hook from the optimizer."""
        if self._handle is not None:
            self._handle.remove()

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._was_called = True
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        self._applied = None if found_inf is None else found_inf.reshape(()) == 0
