"""The Hugging Face Trainer with MindFormers' training step behind it."""

import contextlib
import functools
from pathlib import Path
from typing import Any

from transformers import Trainer, TrainingArguments

from mfwrap.accelerate.attached_step import AttachedStep, attach
from mfwrap.accelerate.setup import EMA
from mfwrap.arguments import described
from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.config import StepConfig
from mfwrap.loss_scale.cells import DynamicLossScaleUpdateCell
from mfwrap.loss_scale.live import ScaleSense
from mfwrap.outputs import StepReport
from mfwrap.schedules.deferred import (
    DeferredSchedule,
    defer_schedule,
    is_stepped_with_a_metric,
    undefer_schedule,
)
from mfwrap.step.local_norms import CommunicationHook
from mfwrap.tensors.wrappers import unwrapped_optimizer
from mfwrap.termination import RankTermination
from mfwrap.trainer.checkpoint import StagedCheckpoint, TrainerPosition
from mfwrap.trainer.data_position import DataPosition
from mfwrap.trainer.events import TerminationCallback, announce_checkpoint, handler_class
from mfwrap.trainer.log import StepLog
from mfwrap.trainer.trainer_losses import LossMixin
from mfwrap.trainer.trainer_saving import CheckpointMixin
from mfwrap.trainer.trainer_settings import loop_settings

__all__ = ["MFTrainer", "MFTrainerMixin"]


class MFTrainerMixin(LossMixin, CheckpointMixin):
    """Give a Trainer, or any subclass of it, MindFormers' training step.

    Mixed in before the class: ``class MySFT(MFTrainerMixin, SFTTrainer)``. The arguments keep their
    meaning and the results are those of the Trainer, with these differences:

    - An update whose gradients are not finite is skipped in every precision; the schedule and
      the average stay where they are.
    - Clipping reads the gradients once and is folded into the optimizer's own pass. It comes from
      ``args.max_grad_norm``; 0 reports the norm and does not clip.
    - With ``args.logging_nan_inf_filter`` a loss that is not finite is left out of the logged mean
      and counted, without a read on the host.
    - The log gains ``loss_scale``, ``applied_updates``, ``skipped_updates``, ``overflows``,
      ``non_finite_losses``, and with ``step.local_norm`` a ``local_norm/<group>`` for each group.
    - Callbacks get ``step_output`` and ``step_report`` in ``on_step_end``.
    - The ``train_loss`` of a resumed run is the mean over all of its steps, also those before.
    - Checkpoints are written beside and moved into place, and one that is damaged or of another
      network is refused by name. A resumed run is the run that was not stopped; callbacks' states
      are restored in place.
    - At SIGTERM the step is finished, a checkpoint saved, and the process exits with status 0; of
      several ranks one signal at any of them stops all after the same step. A second SIGTERM ends
      a process at once.

    Args:
        args: As the Trainer's.
        step: Settings of the step. Its `gradient_accumulation_steps` and `max_grad_norm` are those
            of ``args``, or left alone; how losses are normalised is the Trainer's own affair.
        ema: Follows the weights: a callable that makes an average of the prepared model, or an
            average of its parameters. The attribute ``ema`` holds it.
        scale_sense: The loss scale: a number, a tensor or an update cell. By default
            ``DynamicLossScaleUpdateCell(65536, 2, 2000)`` with ``args.fp16``, on every device, and
            1 otherwise.
        communication_hook: ``(state, hook)``, which DistributedDataParallel reduces gradients with
            once their local norms are taken; ``None`` for the usual all-reduce.
        kwargs: As the Trainer's.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If a setting contradicts ``args``.
    """

    def __init__(
        self,
        *args: Any,
        step: StepConfig | None = None,
        ema: EMA | None = None,
        scale_sense: ScaleSense | None = None,
        communication_hook: CommunicationHook | None = None,
        **kwargs: Any,
    ) -> None:
        if step is not None and not isinstance(step, StepConfig):
            msg = f"`step` must be a StepConfig or None, got {described(step)}"
            raise TypeError(msg)
        self._step_arguments = (StepConfig() if step is None else step, ema, scale_sense)
        self._communication_hook = communication_hook
        self._keeps_average = ema is not None
        self._termination = RankTermination()
        self._position: TrainerPosition | None = None
        self._data_position = DataPosition()
        self._resumed_from: str | None = None
        self._staged: StagedCheckpoint | None = None
        self._saved_step: int | None = None
        self._training_loss: float | None = None
        super().__init__(*args, **kwargs)
        handler: Any = self.callback_handler
        handler.__class__ = handler_class(type(handler))
        handler.steps = self
        # Behind the Trainer's own, which asks for evaluations, and before the user's, which may
        # make ready for them.
        handler.callbacks.insert(1, TerminationCallback(self._termination))

    # What the Trainer builds

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and attach the step to it."""
        super().create_accelerator_and_postprocess()
        config, ema, scale_sense = self._step_arguments
        if ema is not None and self.args.n_gpu > 1:
            msg = (
                "`ema` must be None with DataParallel, got an average on "
                f"{self.args.n_gpu} devices of one process; start it with torchrun"
            )
            raise ValueError(msg)
        if scale_sense is None:
            scale_sense = DynamicLossScaleUpdateCell(65536, 2, 2000) if self.args.fp16 else 1.0
        self.attached: AttachedStep = attach(
            self.accelerator,
            loop_settings(config, self.args),
            ema,
            scale_sense=scale_sense,
            communication_hook=self._communication_hook,
        )
        self.step_log = StepLog(self.accelerator.device)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Create the schedule; it advances once it is known that an update was applied."""
        schedule: Any = super().create_scheduler(*args, **kwargs)
        steps = self.attached.step
        if not isinstance(schedule, DeferredSchedule) and not is_stepped_with_a_metric(schedule):
            optimizer = unwrapped_optimizer(self.optimizer)
            defer_schedule(schedule, lambda: steps.was_skipped(optimizer), steps.flush)
        if isinstance(schedule, DeferredSchedule) and schedule not in steps.schedules:
            steps.schedules.append(schedule)
        return schedule

    @property
    def ema(self) -> ExponentialMovingAverage | None:
        """The average of the weights; ``None`` without one, and before training has begun."""
        return self.attached.ema

    # What callbacks are told

    def report_of_step(self) -> StepReport | None:
        """Return the report of the last update."""
        return self.attached.last_report

    def answer_late(self, *, late: bool) -> None:
        """Let ``optimizer_step_was_skipped`` say False instead of waiting, or no longer."""
        self.attached.answers_late = late

    def before_event(self, event: str) -> None:
        """Take over where a checkpoint has left off, and count steps."""
        if event == "on_train_begin" and self._resumed_from is not None:
            announce_checkpoint(self.callback_handler.callbacks, Path(self._resumed_from))
        if event == "on_train_begin":
            self.step_log.begin = self.state.global_step
            if self._position is not None:
                self._position.restore_log(self)
        elif event == "on_epoch_begin":
            self._begin_epoch()
        elif event == "on_step_end" and self.attached.last_report is not None:
            self.step_log.count(self.attached.last_report)

    def _begin_epoch(self) -> None:
        """Note the random generators, which an epoch's order comes from; resumed ones first."""
        checkpoint, self._resumed_from = self._resumed_from, None
        self._data_position.watch(self.callback_handler.train_dataloader)
        if checkpoint is not None and float(self.state.epoch).is_integer():
            self._load_rng_state(checkpoint)
        elif checkpoint is not None and self._position is not None:
            self._position.restore_epoch()
            if not self.args.ignore_data_skip:
                restore = functools.partial(super()._load_rng_state, checkpoint)
                self._data_position.resume(self._position.data, restore)
        self._position = TrainerPosition.now()

    def _load_rng_state(self, checkpoint: str | None) -> None:
        # The Trainer asks once the first batches are made, which draws from what it sets.
        if not self._data_position.goes_on:
            super()._load_rng_state(checkpoint)

    # A training

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        filters = self.args.logging_nan_inf_filter
        self.step_log.restart(filters=filters)
        self._position, self._resumed_from = None, resume_from_checkpoint
        self._saved_step = None
        if resume_from_checkpoint is not None:
            self._position = TrainerPosition.load(
                Path(resume_from_checkpoint), self.args.process_index, self.args.world_size
            )
        if self._position is not None:
            # The order of the data comes from the seed that was set when its loader was made.
            self._position.restore_epoch()
        # The Trainer's own filter reads each loss on the host.
        self.args.logging_nan_inf_filter = False
        try:
            with self._termination:
                result = super()._inner_training_loop(
                    batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval
                )
                is_told_to_end = self._termination.conclude(self.accelerator.device)
                if is_told_to_end and self._saved_step != self.state.global_step:
                    trained: Any = self.model
                    self._save_checkpoint(trained, trial)
            self.attached.flush()
        except BaseException:
            # The schedule's last step is due, whatever else went wrong.
            with contextlib.suppress(RuntimeError):
                self.attached.flush()
            self._put_weights_back()
            raise
        finally:
            self.args.logging_nan_inf_filter = filters
            self._data_position.release()
            self._hand_schedules_back()
        if is_told_to_end:
            raise SystemExit(0)
        return result

    def _hand_schedules_back(self) -> None:
        """Let schedules step at once again: after a training they are their owner's."""
        for schedule in self.attached.step.schedules:
            if isinstance(schedule, DeferredSchedule):
                undefer_schedule(schedule)
        self.attached.step.schedules.clear()

    def _put_weights_back(self) -> None:
        """Let callbacks that hold other weights in the model end that."""
        for callback in self.callback_handler.callbacks:
            put_back = getattr(callback, "put_weights_back", None)
            if put_back is not None:
                put_back()


class MFTrainer(MFTrainerMixin, Trainer):
    """`transformers.Trainer` with MindFormers' training step; see `MFTrainerMixin`.

    Example:
        >>> import torch
        >>> from transformers import LlamaConfig, LlamaForCausalLM, TrainingArguments
        >>> from mfwrap import ExponentialMovingAverage, StepConfig
        >>> from mfwrap.trainer import MFTrainer
        >>> model = LlamaForCausalLM(
        ...     LlamaConfig(
        ...         vocab_size=8,
        ...         hidden_size=8,
        ...         intermediate_size=8,
        ...         num_hidden_layers=1,
        ...         num_attention_heads=1,
        ...     )
        ... )
        >>> tokens = torch.arange(8)
        >>> trainer = MFTrainer(
        ...     model,
        ...     TrainingArguments(
        ...         "run", max_steps=2, report_to="none", disable_tqdm=True, use_cpu=True
        ...     ),
        ...     train_dataset=[{"input_ids": tokens, "labels": tokens}] * 16,
        ...     step=StepConfig(local_norm=True, local_norm_groups="layer"),
        ...     ema=lambda model: ExponentialMovingAverage(model, 0.99),
        ... )
        >>> result = trainer.train()  # doctest: +ELLIPSIS
        {...
        >>> trainer.attached.last_output.overflow
        tensor(False)
    """
