"""Use averaged weights to evaluate, to choose the best checkpoint and to export the model."""

import contextlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from transformers import TrainerControl, TrainerState, TrainingArguments

from mfwrap import ExponentialMovingAverage, StepReport
from mfwrap.arguments import check_bool, check_int
from mfwrap.average.tensors import write
from mfwrap.callbacks.average.evaluated_averages import EvaluatedAverages
from mfwrap.callbacks.average.files import (
    export_averages,
    has_state,
    is_sharded,
    load_exported,
    read_state,
    resumed_checkpoint,
    save_state,
    saved_checkpoint,
    set_aside_states,
)
from mfwrap.callbacks.average.snapshots import (
    begin_snapshots,
    build_average,
    save_snapshot,
    weighted_sums,
)
from mfwrap.checkpoints.network_weights import adapters_of, drop_loaded_average
from mfwrap.collectives import raising_together
from mfwrap.records.evaluations import (
    ends_with_averages,
    mark_averages,
    note_averages,
    note_loaded_averages,
    prefix_of,
)
from mfwrap.tensors.module_hooks import keep_out_of_copies
from mfwrap.tensors.wrappers import unwrapped_optimizer
from mfwrap.trainer import MonitorCallback

_DTYPES: dict[str | None, torch.dtype | None] = {
    None: None,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""Dtypes of snapshots."""


@final
class EMACallback(MonitorCallback):
    """Use averaged weights to evaluate, to choose the best checkpoint and to export the model.

    In an `MFTrainer` with ``ema=`` the callback uses the Trainer's average. In any other Trainer it
    keeps its own average. This separate average follows applied updates only, starts anew with each
    training that is not resumed, and is saved in each checkpoint. An `MFTrainer` lists the
    callback's files in the checkpoint's manifest. In a stock Trainer's checkpoint they are extra
    files.

    - Evaluations during training use the averaged weights, including the evaluation at the start
      that ``args.eval_on_start`` requests. So the best checkpoint is the one with the best
      averaged weights.
    - ``trainer.evaluate()`` and ``trainer.predict()`` use the model's current weights; to use the
      averages, call them inside ``with callback.ema.swap():``.
    - ``checkpoint-*/ema`` holds the model with averaged weights, for ``from_pretrained``. For a
      plain ``nn.Module`` it holds ``model.safetensors`` only.
    - With ``args.load_best_model_at_end``, the model ends with the averaged weights of the best
      checkpoint, whose raw weights are in ``trainer.state.best_model_checkpoint``. With
      `load_best` False, it ends with these raw weights; the averaged ones are in the folder ``ema``
      of the checkpoint. ``callback.ema`` stays the average of the last step.
    - Otherwise the model ends with its raw weights of the last step; ``callback.ema.copy_to()``
      replaces them with the averages.
    - `mfwrap train` saves the raw weights as ``model`` and the averaged ones as ``model_ema``,
      whatever `load_best` says, both of the best checkpoint or both of the last step.

    In an `MFTrainer`, the averages are in the model during an evaluation of the training, and at no
    other time, in any order of the callbacks. So ``on_prediction_step``, ``on_log`` of the results
    and ``on_evaluate`` see the averages, and each other event sees the raw weights. mfwrap's
    monitors read the raw weights at all times, and so does a callback of your own inside ``with
    mfwrap.average.swap.training_weights():``. ``trainer.save_model()`` saves the raw weights there,
    too, and the averages inside ``with callback.ema.swap():``. The callback adds no host-device
    synchronization to a step.

    In a stock Trainer, place this callback after any callback that requests an evaluation. From
    then on, the averages are in the model until the evaluation is done. With several evaluation
    data sets they stay there until the model is saved, loaded or trained again.

    Args:
        decay: Decay of the callback's own average, in [0, 1); 0.999 by default.
        warmup: Warm up the decay of the callback's own average, see `ExponentialMovingAverage`;
            ``False`` by default.
        update_every: Update the callback's own average at every `update_every`-th step, see
            `ExponentialMovingAverage`; 1 by default.
        sigma_rel: Relative lengths of the callback's own power-function averages, instead of
            `decay`, see `ExponentialMovingAverage`. The first is evaluated and exported.
        snapshot_every: Write the power-function averages to ``average_snapshots`` in the run folder
            at every `snapshot_every`-th step; ``None`` for never. `load_average` and
            `mfwrap average` build averages of other lengths from them. A snapshot takes as many
            bytes as the averages; its step synchronizes with the device. Twenty snapshots or more
            in a training are advisable.
        snapshot_dtype: Dtype of the averages in snapshots: ``"float32"``, ``"bfloat16"`` or
            ``"float16"``, with half the bytes and rounded to 3 or 4 digits. By default that of the
            averages.
        evaluate: Evaluate with averaged weights.
        export: Write ``checkpoint-*/ema``.
        load_best: With ``args.load_best_model_at_end``, end with the averaged weights of the best
            checkpoint. The default is ``True`` if `evaluate` and `export` are both ``True``.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a setting is out of range, or `load_best` is on without `evaluate` and
            `export`. At the start of training: if a setting of the own average is given but the
            Trainer has an average, if the Trainer has two `EMACallback` objects, if weights are
            sharded and the Trainer has no average, or if `snapshot_every` is given and the average
            has no `sigma_rel`.
    """

    def __init__(
        self,
        decay: float | None = None,
        *,
        warmup: bool | None = None,
        update_every: int | None = None,
        sigma_rel: float | Sequence[float] | None = None,
        snapshot_every: int | None = None,
        snapshot_dtype: str | None = None,
        evaluate: bool = True,
        export: bool = True,
        load_best: bool | None = None,
    ) -> None:
        settings = {
            "decay": decay,
            "warmup": warmup,
            "update_every": update_every,
            "sigma_rel": sigma_rel,
        }
        self._settings: dict[str, Any] = {k: v for k, v in settings.items() if v is not None}
        # Average a dummy tensor, so that a wrong setting raises here and not when training begins.
        ExponentialMovingAverage([torch.zeros(())], **self._settings)
        if snapshot_every is not None:
            check_int("snapshot_every", snapshot_every)
        if snapshot_dtype not in _DTYPES:
            allowed = ", ".join(map(repr, _DTYPES))
            msg = f"`snapshot_dtype` must be one of {allowed}, got {snapshot_dtype!r}"
            raise ValueError(msg)
        self._snapshot_every, self._snapshot_dtype = snapshot_every, _DTYPES[snapshot_dtype]
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
        self.loads_best = evaluate and export if load_best is None else load_best
        """Whether the model ends with the averaged weights of the best checkpoint."""
        self._evaluates = evaluate
        self._exports = export
        self._is_own = False
        self._is_entered = self._will_be_entered = False
        self._updates: AppliedUpdates | None = None
        self._evaluated = EvaluatedAverages()
        self._loading = contextlib.ExitStack()
        self._resumed_from: Path | None = None
        self._is_saved = False
        self._adapters: set[str] | None = None
        """Names of the model's adapters before a training; ``None`` if they are unknown."""

    def on_init_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: Any,
    ) -> None:
        """Note which adapters the model has before a checkpoint is loaded."""
        del args, state, control
        self._adapters = adapters_of(model)

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Use the Trainer's average, if any; else make or resume the callback's own average."""
        self._evaluated.end()
        self._loading.close()
        self._stop_watching()
        self._is_saved = False
        self._is_entered, self._will_be_entered = self._will_be_entered, False
        resumed_from, self._resumed_from = self._resumed_from, None
        self._refuse_another(state)
        if state.global_step > 0 and self._adapters is not None:
            drop_loaded_average(model, self._adapters)
        attachment = getattr(optimizer, "attachment", None)
        of_trainer = getattr(attachment, "ema", None)
        self._is_own = of_trainer is None
        if of_trainer is not None:
            self._refuse_settings()
            self.ema = of_trainer
        else:
            self.ema = self._own_average(model)
            if state.global_step > 0:
                _resume(self.ema, resumed_from or resumed_checkpoint(args, state))
            if self.ema.sigma_rel:
                with raising_together():
                    if args.should_save:
                        set_aside_states(Path(args.output_dir or "."), state.global_step)
            if attachment is None:
                self._updates = AppliedUpdates(optimizer)
        if self._snapshot_every is not None:
            if not self.ema.sigma_rel:
                msg = (
                    f"`snapshot_every` must be None for an average without `sigma_rel`, got "
                    f"{self._snapshot_every}; give the average `sigma_rel=(0.05, 0.10)`"
                )
                raise ValueError(msg)
            begin_snapshots(Path(args.output_dir or "."), state.global_step)
        if args.eval_on_start:
            self._prepare_evaluation(state, control, model, optimizer, is_due=True)

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Restore the raw weights before the step trains them."""
        del args, state, control
        self._evaluated.end()

    def on_pre_optimizer_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Begin the averages of weights that were frozen from what they are before the update."""
        del args, state, control
        if self.ema is not None and self._is_own:
            self.ema.begin_update()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        step_report: StepReport | None = None,
        **_: Any,
    ) -> None:
        """Update the callback's own average; prepare the evaluation of a stock Trainer."""
        if self.ema is not None and self._is_own:
            self.ema.update(self._applied(step_report))
        every, step = self._snapshot_every, state.global_step
        if self.ema is not None and every is not None and step % every == 0:
            save_snapshot(self.ema, Path(args.output_dir or "."), step, self._snapshot_dtype)
        self._prepare_evaluation(state, control, model, optimizer, is_due=control.should_evaluate)

    def on_epoch_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        optimizer: Any = None,
        **_: Any,
    ) -> None:
        """Put the averages into the model if an evaluation of a stock Trainer follows."""
        del args
        self._evaluated.end()
        self._prepare_evaluation(state, control, model, optimizer, is_due=control.should_evaluate)

    def expect_evaluations(self) -> None:
        """Leave the model as it is in the events before an evaluation; `evaluation` is entered."""
        self._will_be_entered = True

    @contextlib.contextmanager
    def evaluation(self, state: TrainerState, model: nn.Module) -> Iterator[None]:
        """Have the averages in the model within the block."""
        if not self._evaluates or self.ema is None:
            yield
            return
        self._evaluated.hold(self.ema, model, state.global_step, control=None)
        try:
            yield
        finally:
            self._evaluated.end()

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Note which weights are evaluated, also if the caller has put the averages in."""
        del args, control
        is_swapped = self.ema is not None and self.ema.is_swapped
        note_averages(state, are_evaluated=is_swapped or ends_with_averages(state))

    def on_evaluate(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        metrics: Any = None,
        **_: Any,
    ) -> None:
        """Mark what used averages in the log; restore the weights in a stock Trainer."""
        del args, control
        if prefix_of(state):
            mark_averages(state, metrics or {})
        saw_averages = self._evaluated.evaluated(metrics, state.global_step)
        # A callback may load other weights within `on_evaluate`, when the data set is evaluated.
        if not saw_averages and not (self._is_entered and prefix_of(state)):
            does = "load_state_dict" if self._is_entered else "state_dict"
            warnings.warn(
                "a data set was evaluated with raw weights: something called the model's "
                f"{does} between two data sets, which restores the raw weights",
                stacklevel=2,
            )

    def save_into(self, folder: Path, args: TrainingArguments, model: nn.Module) -> None:
        """Write the average's state and the averaged model into an unfinished checkpoint.

        An `MFTrainer` calls this on every rank before it renames the checkpoint to its final name.
        `on_save` then writes nothing.
        """
        self._is_saved = True
        if self.ema is not None:
            # Without the files of the step, the checkpoint would lack the Trainer's average.
            keeps = self._is_own or (args.save_only_model and not is_sharded(model))
            self._write(self.ema, folder, model, keeps_state=keeps, is_writer=args.should_save)

    def resume_from(self, folder: Path) -> None:
        """Set the checkpoint from which the average is resumed; called by an `MFTrainer`."""
        self._resumed_from = folder

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: Any,
    ) -> None:
        """Write the averages into the checkpoint, if the Trainer has not called `save_into`."""
        del control
        if not self._is_entered:
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
            self._write(self.ema, folder, model, keeps_state=self._is_own, is_writer=True)

    def on_train_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: Any = None,
        **_: Any,
    ) -> None:
        """If the Trainer has loaded the best checkpoint, load its averaged weights instead."""
        del control
        self._evaluated.end()
        self._stop_watching()
        best = state.best_model_checkpoint
        if self.loads_best and args.load_best_model_at_end and best:
            are_loaded = load_exported(model, Path(best))
            note_loaded_averages(state, are_loaded=are_loaded)
            if are_loaded:
                self._note_next_loading(model, state)

    def load_average(
        self,
        run: str | Path,
        *,
        sigma_rel: float | None = None,
        last: int | None = None,
        at: int | None = None,
    ) -> float:
        """Replace the averages of `ema` by others that are built from what a run has stored.

        Call it after the training, on every rank. ``with callback.ema.swap():`` then evaluates and
        saves these averages, and ``callback.ema.copy_to()`` writes them into the model. Sharded
        averages are built shard by shard. Copied buffers stay those of the last step.

        Args:
            run: Run folder.
            sigma_rel: Relative length of a power-function average, from the snapshots and
                checkpoints of the run.
            last: Number of the last checkpoints whose weights are averaged, instead of `sigma_rel`.
            at: Number of applied updates of the average of length `sigma_rel`: the last stored
                averages at or before it end it. By default the last ones.

        Returns:
            Relative L2 error of the profile of the average; 0 with `last`.

        Raises:
            RuntimeError: Before a training, or inside `ema.swap`.
            ValueError: If the average cannot be built, see `mfwrap average`.
        """
        if self.ema is None:
            msg = "`load_average` must be called after the training, when the callback has an `ema`"
            raise RuntimeError(msg)
        self.ema.refuse_inside_swap("load_average")
        built = build_average(Path(run), sigma_rel=sigma_rel, last=last, at=at)
        averages = dict(self.ema.named_averages())
        built.check_fit(averages)
        for name, value in weighted_sums(built, averages):
            write([averages[name]], [value])
        return built.response_error

    def put_weights_back(self) -> None:
        """Restore the raw weights if an interrupted evaluation left averages in the model."""
        self._evaluated.end()

    def _note_next_loading(self, model: nn.Module, state: TrainerState) -> None:
        """Note the end of the averages in `model` when its ``load_state_dict`` is called."""

        def note(*_: Any) -> None:
            note_loaded_averages(state, are_loaded=False)

        hook = model.register_load_state_dict_pre_hook(note)
        keep_out_of_copies(model, hook)
        self._loading.callback(hook.remove)

    def _own_average(self, model: nn.Module) -> ExponentialMovingAverage:
        if is_sharded(model):
            msg = (
                "EMACallback cannot average weights that are sharded over ranks; give the Trainer "
                "an average instead: MFTrainer(..., ema=...)"
            )
            raise ValueError(msg)
        return ExponentialMovingAverage(model, **self._settings)

    def _refuse_settings(self) -> None:
        if self._settings:
            given = ", ".join(f"{name}={value}" for name, value in self._settings.items())
            msg = (
                f"EMACallback got {given}, but the Trainer has an average with settings of its "
                "own; leave these arguments out"
            )
            raise ValueError(msg)

    def _refuse_another(self, state: TrainerState) -> None:
        # Refuse a second EMACallback: while the first one holds averages in the model for an
        # evaluation, the second one would average those averages. All callbacks of a training
        # share `state`, so an extra attribute of `state` reveals a second one. The Trainer does
        # not save the attribute, because it saves only the declared fields.
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
        self,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        optimizer: Any,
        *,
        is_due: bool,
    ) -> None:
        if is_due and self._evaluates and self.ema is not None and not self._is_entered:
            # The Trainer calls `eval` of a schedule-free optimizer in the evaluation. It converts
            # the weights of the training, so it must not find averages in the model.
            if callable(getattr(optimizer, "eval", None)):
                optimizer.eval()
            self._evaluated.hold(self.ema, model, state.global_step, control)

    def _write(
        self,
        ema: ExponentialMovingAverage,
        folder: Path,
        model: nn.Module,
        *,
        keeps_state: bool,
        is_writer: bool,
    ) -> None:
        if keeps_state and is_writer:
            save_state(ema, folder)
        if self._exports and (is_writer or is_sharded(model)):
            export_averages(ema, model, folder, is_writer=is_writer)


def average_in_use(state: TrainerState, optimizer: Any) -> ExponentialMovingAverage | None:
    """Return the average of a training: its Trainer's, or an `EMACallback`'s; ``None`` without one.

    Args:
        state: State of the training, after its ``on_train_begin``.
        optimizer: Optimizer as the Trainer passes it to callbacks.
    """
    callback = vars(state).get("ema_callback")
    found: ExponentialMovingAverage | None = getattr(
        getattr(optimizer, "attachment", None), "ema", None
    )
    return found if found is not None or callback is None else callback.ema


def _resume(ema: ExponentialMovingAverage, checkpoint: Path | None) -> None:
    if checkpoint is not None and has_state(checkpoint):
        ema.load_state_dict(read_state(checkpoint))
        return
    reason = (
        "the checkpoint to resume from was not found"
        if checkpoint is None
        else f"{checkpoint} has no average"
    )
    warnings.warn(
        f"the average could not be resumed: {reason}. It restarts from the loaded weights",
        stacklevel=3,
    )


@final
class AppliedUpdates:
    """Find out whether the last update was applied, in a loop without a step report.

    In fp16 a gradient scaler skips an update in one of two ways. A fused optimizer is called with
    the flag ``found_inf`` on the device. Any other optimizer is not called. A hook on the optimizer
    records the call and copies the flag, without host-device synchronization. (The alternatives are
    worse: ``GradScaler.get_scale`` synchronizes at every step, and accelerate's
    ``step_was_skipped`` is always false for a fused optimizer.)

    If the optimizer is not a ``torch.optim.Optimizer`` (DeepSpeed), its attribute
    ``step_was_skipped`` is read instead.

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
            # The hook must run before the update: after it, the scaler removes `found_inf`.
            self._handle = inner.register_step_pre_hook(self._note)

    def last(self) -> Tensor | None:
        """Return whether an update was applied since the last call, without synchronization.

        Returns:
            Shape ``()``, bool. ``None`` also means that the update was applied.
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
