"""`MFTrainerMixin`: give a Trainer MindFormers' training step.

tests/unit/trainer/test_surface.py lists the methods of the Trainer that the mixin overrides, each
with its reason. The other modules of this package have what the methods do.
"""

import contextlib
import copy
import dataclasses
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerControl, TrainingArguments
from transformers.trainer_utils import TrainOutput

from mfwrap.accelerate.attached_step import AttachedStep, attach
from mfwrap.accelerate.attributes import replaced
from mfwrap.accelerate.setup import EMA
from mfwrap.accelerate.state import load_step, save_step
from mfwrap.arguments import check_bool, described, needed_arguments
from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.average.swap import training_weights
from mfwrap.checkpoints.network_weights import (
    adapters_of,
    drop_loaded_average,
    is_in_original_format,
    load_original_format,
)
from mfwrap.collectives import RankWatch, rank_watch
from mfwrap.compatibility.accelerate import check_sharded_load
from mfwrap.compatibility.transformers import (
    batch_size_of,
    check_trainer_release,
    evaluates_batches_itself,
    has_own,
    leave_accumulation_to_trainer,
    leave_meshes_to_step,
    let_cpu_ranks_load,
    loads_weights_itself,
)
from mfwrap.config import StepConfig
from mfwrap.loss_scale.cells import DynamicLossScaleUpdateCell
from mfwrap.loss_scale.live import ScaleSense
from mfwrap.records.run_files import records_of_training
from mfwrap.records.skipped_rows import SkipRows
from mfwrap.schedules.batch_growth import RampUp
from mfwrap.schedules.deferred import DeferredSchedule, defer_schedule, is_stepped_with_a_metric
from mfwrap.step.error_notes import explain_targets
from mfwrap.step.losses import named_losses
from mfwrap.step.ranks.local_norms import CommunicationHook
from mfwrap.tensors.wrappers import unwrapped_optimizer
from mfwrap.termination import RankTermination
from mfwrap.trainer.checkpoint import Checkpoints
from mfwrap.trainer.data.followed_loader import followed_loader
from mfwrap.trainer.data.global_batch import TrainerBatch, check_micro_batches
from mfwrap.trainer.data.growth import GrowingBatch
from mfwrap.trainer.data.parts import Part, UpdateParts
from mfwrap.trainer.data.position import TrainerPosition
from mfwrap.trainer.data.skip import NO_CHECKPOINT, DataSkip, refuse_growth
from mfwrap.trainer.data.stateful_loader import new_stateful_loader
from mfwrap.trainer.display.console import closed_after_error, show_in_one_place
from mfwrap.trainer.error_notes import explain_missing_loss, explaining_training
from mfwrap.trainer.evaluation import Evaluation
from mfwrap.trainer.events import (
    RequestedSave,
    StepCallbackHandler,
    add_step_to_events,
    check_given_callbacks,
    evaluating,
    flushed_at_end,
    monitors,
)
from mfwrap.trainer.hub_token import without_saved_token
from mfwrap.trainer.kept_attributes import restore_attributes, save_attributes
from mfwrap.trainer.log import Losses, with_outputs
from mfwrap.trainer.model_card import extended_card
from mfwrap.trainer.optimizer_settings import ContinuedSchedule, OptimizerSettings
from mfwrap.trainer.outer_weights import restore_outer_weights, save_outer_weights
from mfwrap.trainer.preflight import (
    check_construction,
    check_trainer_ranks,
    warn_of_undivided_loss,
)
from mfwrap.trainer.rollback import Rollback, Rollbacks
from mfwrap.trainer.row_losses import LossBy, LossByRow
from mfwrap.trainer.run_facts import TrainerFacts
from mfwrap.trainer.stops import save_last_step, stop

if TYPE_CHECKING:
    # The mixin is combined with a Trainer, so it has the Trainer's methods.
    _Base = Trainer
else:
    _Base = object


_LOG = logging.getLogger(__name__)

_EVALUATION_EVENTS = frozenset({"on_prediction_step", "on_log", "on_evaluate"})
"""Events that do not end the time in which a requested evaluation is run."""

_USUAL: contextlib.AbstractContextManager[None] = contextlib.nullcontext()

_UNWATCHED: contextlib.AbstractContextManager[Callable[..., None]] = contextlib.nullcontext(
    lambda *_: None
)
"""What follows the rows of a micro-batch if nothing needs them."""


_OWN = {
    "attached": AttachedStep,
    "batch_growth": GrowingBatch,
    "loss_by_row": LossByRow,
    "rollbacks": Rollbacks,
    "run_facts": TrainerFacts,
}
"""Attributes at which the mixin's parts look. Private ones have names that no subclass takes."""


class MFTrainerMixin(_Base):
    """Give a Trainer, or any subclass of it, MindFormers' training step.

    List the mixin before the Trainer class: ``class MySFT(MFTrainerMixin, SFTTrainer)``. The
    Trainer's arguments keep their meaning, and its results stay the same, with these differences:

    - An update with non-finite gradients is skipped, in any precision: float16, bfloat16 or
      float32. The schedule and the average of the weights then do not advance either.
    - Clipping to ``args.max_grad_norm`` is done in the optimizer's own pass over the gradients.
      Computing the norm reads them once. With 0, the norm is reported and nothing is clipped.
    - With ``args.logging_nan_inf_filter``, a non-finite loss is counted and left out of the logged
      mean. This does not synchronize with the device.
    - The log gains ``loss_scale``, ``applied_updates``, ``skipped_updates``, ``overflows`` and
      ``non_finite_losses``, with ``step.local_norm`` a ``local_norm/<group>`` for each group, and a
      ``learning_rate/<name>`` for each parameter group if all of them have a ``name``.
    - Callbacks get ``step_output`` and ``step_report`` as keywords of ``on_step_end``.
    - The ``train_loss`` of a resumed training is the mean over all its steps, including those
      before the checkpoint.
    - Before the first update, all ranks compare models, settings and versions. If they disagree,
      all of them raise the same error.
    - A checkpoint is written to a temporary folder and renamed. Resuming from a damaged checkpoint,
      or from a checkpoint of another network, raises an error that names the checkpoint.
    - A resumed training continues as if it had never stopped. Restored callbacks stay the same
      objects: mfwrap's always, others with ``args.restore_callback_states_from_checkpoint``.
    - At SIGTERM or SIGUSR1 the current step is finished, a checkpoint is saved, and the process
      exits with status 75. With several ranks, a signal to any rank stops all of them after the
      same step. The same signal again, after more than 5 seconds, ends the process at once.
    - The first Ctrl-C does the same, then raises ``KeyboardInterrupt``; the second raises at once.
    - ``train(resume_from_checkpoint="auto")`` starts a training, or resumes it from the newest
      intact checkpoint in ``args.output_dir``. The log names the checkpoint of a resume.

    Before its first training, the trainer can be pickled like a Trainer, for example for a
    hyperparameter search. The copy has a step of its own, with the same settings and state. A
    function that you pass as `ema` must then be defined in a module, because pickle cannot find a
    ``lambda``.

    Args:
        args: Positional arguments of the Trainer.
        step: Settings of the step. Leave `gradient_accumulation_steps` and `max_grad_norm` at their
            defaults, or give the values of the training arguments. Leave
            `calculate_per_token_loss` at False, because the Trainer itself normalizes losses, and
            `sync_each_batch`, which the Trainer takes from its ``accelerator_config``.
        ema: Average of the weights, updated after each applied update: an average of the model's
            parameters, or a callable that gets the prepared model and returns an average. The
            attribute ``ema`` holds it.
        scale_sense: Loss scale: a number, a tensor or an update cell. Defaults to
            ``DynamicLossScaleUpdateCell(65536, 2, 2000)`` with ``fp16`` training arguments, on
            every device, and to 1 otherwise.
        communication_hook: ``(state, hook)`` with which DistributedDataParallel reduces gradients
            after their local norms are taken; ``None`` for the usual all-reduce.
        data_skip_steps: Number of updates whose data are skipped at the start, without training on
            them; see `mfwrap.trainer.data.skip.DataSkip` for what it means in a resume. Data need a
            length, and ``args.ignore_data_skip`` switches it off.
        skip_rows: Rows of the training data to leave out: pairs of an epoch and a position in its
            order, both from 0, or the path of a file with such rows, one JSON object per line
            (`mfwrap.records.read_skipped_rows`). See `mfwrap.trainer.data.row_skip.RowSkip`. A
            training that resumes without the argument leaves out the rows of its checkpoint.
        rollback: When to go back to a checkpoint after a bad step; ``None`` for never.
        rampup_batch_size: How the batch grows to the usual global batch:
            ``[start, increment, samples]``, or a table of sizes by the update from which they hold
            (`mfwrap.schedules.BatchGrowth`). Sizes count the rows of an update on all ranks, and
            are multiples of the rows of one micro-batch on all ranks. ``None`` for a batch of one
            size.
        eval_per_token_loss: Whether the loss of an evaluation is the mean over all targets, on any
            number of ranks. The targets are the ``labels`` that are not -100, without the first one
            of each row if the model predicts the next token. By default the loss is the mean over
            the rows: the mean loss of each batch, weighted by its rows.
        use_stateful_dataloader: Whether a resume restores the place in iterable data by their own
            state, through torchdata's ``StatefulDataLoader``. By default it reads the rows before
            its place again and throws them away.
        loss_by: Source of each row of the training data: the name of a column of it, a name for
            each row, or a name for each part of a ``torch.utils.data.ConcatDataset``. The log then
            has ``loss/<source>``, the mean loss of the source's targets since the last log, and
            ``tokens/<source>``, their number, over all micro-batches and ranks. Models must return
            ``logits`` (TRL's: ``log_probs``). See `mfwrap.trainer.row_losses.LossByRow` for what it
            costs. ``None`` for no such log.
        row_losses: Whether to write the loss of each row to the folder ``row_losses`` of the run,
            with its place in the data; ``mfwrap rows`` shows the highest and the lowest. It needs
            pyarrow. See `mfwrap.records.row_losses`.
        async_save: Whether checkpoints of the training are written in the background. A save copies
            the state to host memory, and a thread writes it while the training goes on. The next
            save and the end of the training wait for it. Callbacks get ``on_save`` when the
            checkpoint is in place, before the first step after that. An error of the thread is
            raised there, too. See docs/how-to/checkpoints.md for what it takes, and what is saved
            at once.
        kwargs: Keyword arguments of the Trainer.

    Raises:
        ReleaseError: If transformers is older than 5.5; it is an ImportError.
        TypeError: If an argument has the wrong type, if the optimizer changes its weights during
            backward (LOMO, layer-wise GaLore and APOLLO), or if a subclass has a
            ``create_accelerator_and_postprocess`` that does not call ``super``.
        ValueError: If a setting contradicts the training arguments, or ``args.optim`` names such an
            optimizer.
    """

    def __init__(
        self,
        *args: Any,
        step: StepConfig | None = None,
        ema: EMA | None = None,
        scale_sense: ScaleSense | None = None,
        communication_hook: CommunicationHook | None = None,
        data_skip_steps: int | None = None,
        skip_rows: SkipRows | None = None,
        rollback: Rollback | None = None,
        rampup_batch_size: RampUp | None = None,
        eval_per_token_loss: bool = False,
        use_stateful_dataloader: bool = False,
        loss_by: LossBy | None = None,
        row_losses: bool = False,
        async_save: bool = False,
        **kwargs: Any,
    ) -> None:
        check_trainer_release()
        if step is not None and not isinstance(step, StepConfig):
            msg = f"`step` must be a StepConfig or None, got {described(step)}"
            raise TypeError(msg)
        check_given_callbacks(super().__init__, args, kwargs)
        # Set these attributes before `super().__init__`: it calls
        # `create_accelerator_and_postprocess`, which needs them.
        self.__step_config = StepConfig() if step is None else step
        self.__given_ema, self.__given_scale = ema, scale_sense
        self.__communication_hook = communication_hook
        check_bool("async_save", async_save)
        self.__checkpoints = Checkpoints(
            self, keeps_average=ema is not None, in_background=async_save
        )
        self.__position = TrainerPosition(is_stateful=use_stateful_dataloader)
        self.__parts = UpdateParts(self)
        self.__skip = DataSkip(
            self, self.__parts, data_skip_steps, skip_rows, may_go_back=rollback is not None
        )
        self.loss_by_row = LossByRow(self, self.__skip.noted, loss_by, records_rows=row_losses)
        wait = functools.partial(self.__checkpoints.background.settle, waits=True)
        self.rollbacks = Rollbacks(self, rollback, self.__skip, wait)
        self.__batch = TrainerBatch(self, self.__step_config)
        self.batch_growth = GrowingBatch(self, rampup_batch_size, self.__batch, self.__parts)
        others = {"data_skip_steps": data_skip_steps, "skip_rows": skip_rows, "rollback": rollback}
        others["use_stateful_dataloader"] = use_stateful_dataloader or None
        given = [name for name, value in others.items() if value is not None]
        if self.batch_growth.is_on and given:
            refuse_growth(f"`{given[0]}`")
        self.__evaluation = Evaluation(self, per_token=eval_per_token_loss)
        self.__optimizer_settings = OptimizerSettings()
        self.__termination = RankTermination()
        self.run_facts = TrainerFacts(self, self.__termination, self.__skip.rows)
        self.say_resume: Callable[[str], None] = _LOG.info
        """Called in the main process with the line that names the checkpoint of a resume."""
        self.__watch: RankWatch | None = None
        super().__init__(*args, **kwargs)
        if not hasattr(self, "attached"):
            name = "create_accelerator_and_postprocess"
            msg = f"`{name}` of {type(self).__name__} must call `super().{name}()`"
            raise TypeError(msg)
        # Where gradients lie on several meshes, the Trainer would clip them itself, although they
        # are still scaled. The attached accelerator clips the gradients of any meshes.
        leave_meshes_to_step(self)
        check_construction(self)
        self.__position.check_data(self.train_dataset)
        self.__connect_events()

    @property
    def ema(self) -> ExponentialMovingAverage | None:
        """Average of the weights; ``None`` without an average or before its creation.

        A subclass may keep an average of its own under this name.
        """
        if "ema" not in vars(self):
            return self.attached.ema
        own: ExponentialMovingAverage | None = vars(self)["ema"]
        return own

    @ema.setter
    def ema(self, value: Any) -> None:
        vars(self)["ema"] = value

    def __connect_events(self) -> None:
        """Pass the step's results to the callbacks of the handler, which may be a new one."""
        if not isinstance(self.callback_handler, StepCallbackHandler):
            add_step_to_events(
                self,
                self._mfwrap_before_event,
                self._mfwrap_after_event,
                self.__termination,
                self.run_facts,
                RequestedSave(self.__checkpoints.requests),
            )
            show_in_one_place(self.callback_handler, self.__termination)

    def create_accelerator_and_postprocess(self) -> None:
        """Create the accelerator, and attach the step to it."""
        super().create_accelerator_and_postprocess()
        leave_accumulation_to_trainer(self.accelerator)
        if self.__given_ema is not None and self.args.n_gpu > 1:
            msg = (
                "`ema` must be None with DataParallel, got an average with "
                f"{self.args.n_gpu} GPUs in one process; start the training with torchrun, one "
                "process per GPU"
            )
            raise ValueError(msg)
        scale_sense = self.__given_scale
        if scale_sense is None:
            scale_sense = DynamicLossScaleUpdateCell(65536, 2, 2000) if self.args.fp16 else 1.0
        self.attached: AttachedStep = attach(
            self.accelerator,
            loop_settings(self.__step_config, self.args),
            self.__given_ema,
            scale_sense=scale_sense,
            communication_hook=self.__communication_hook,
        )
        self.__losses = Losses(self)

    def create_scheduler(self, *args: Any, **kwargs: Any) -> Any:
        """Create the schedule, which then advances only for applied updates."""
        result: Any = super().create_scheduler(*args, **kwargs)
        # A method of the user's own may return nothing.
        schedule: Any = self.lr_scheduler
        if schedule is None:
            return result
        steps = self.attached.attachment.step
        if not isinstance(schedule, DeferredSchedule) and not is_stepped_with_a_metric(schedule):
            optimizer = unwrapped_optimizer(self.optimizer)
            defer_schedule(
                schedule,
                functools.partial(steps.outcome_is_known, optimizer),
                functools.partial(steps.was_skipped, optimizer),
            )
        if isinstance(schedule, DeferredSchedule):
            steps.add_schedule(schedule)
        return result

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as the Trainer does; first check the run folder and the checkpoint to resume from.

        A resume restores the generators of torch, Python and NumPy that the samplers, the data set
        and the collator hold in attributes, lists, dicts and functions, but not in sets and global
        variables, and in a list of more than 16 dicts or lists only in the first 16. A generator
        that is made in the first batch, not in ``__init__``, continues only after that batch of the
        resume. A generator that a sampler and the data set share is not restored. On another number
        of ranks, rank ``r`` restores the random states of rank ``r % n`` of the checkpoint's ``n``
        ranks.

        Args:
            resume_from_checkpoint: Folder of a checkpoint, or ``True`` for the newest one. With
                ``"auto"`` (for a folder of that name, give ``"./auto"``) the newest intact one if
                there is any, else a training from the start; newer damaged ones cause a warning. A
                training that has finished, or that early stopping has ended, makes no update.
            trial: Trial of a hyperparameter search.
            args: Further positional arguments of the Trainer's method.
            kwargs: Further keyword arguments of the Trainer's method.

        Raises:
            BlockingIOError: On all ranks, if another program trains in the run folder.
            OSError: On all ranks, if any rank cannot write to the run folder.
            RuntimeError: On all ranks, before the first update, if the ranks disagree about what
                they train, or if the disk has no room for a checkpoint.
            ValueError: If the checkpoint is damaged or incomplete, belongs to another network, or
                holds an average while the trainer keeps none. If the checkpoint itself is at fault,
                the message names the newest intact checkpoint before it. Nothing has been loaded
                when the error is raised.
        """
        asked_for = resume_from_checkpoint
        _check_attributes(self)
        self.__connect_events()
        with self.__checkpoints.owning_run_folder(asked_for, trial):
            while True:
                asked_for = self.rollbacks.begin(asked_for)
                if asked_for:
                    asked_for = self.__checkpoints.checked(asked_for, trial)
                given = (asked_for or None, trial, *args)
                # A method of the user's own may take fewer arguments, and need some.
                num_needed = len(needed_arguments(super(), "train"))
                while len(given) > num_needed and given[-1] is None:
                    given = given[:-1]
                with self.__batch.resuming(Path(asked_for) if asked_for else None):
                    result = super().train(*given, **kwargs)
                asked_for = self.rollbacks.target
                if asked_for is None:
                    return result

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: TrainingArguments | None = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        self.__checkpoints.saved_step = None
        with self.__training(resume_from_checkpoint):
            result = super()._inner_training_loop(
                batch_size, args, resume_from_checkpoint, trial, ignore_keys_for_eval
            )
            must_exit = self.__termination.conclude(self.accelerator.device)
            self.rollbacks.decide()
            if must_exit and self.rollbacks.target is None:
                save_last_step(self, trial, self.__checkpoints.saved_step)
        if must_exit:
            stop(self, trial, is_interrupted=self.__termination.is_interrupted)
        return result

    @contextlib.contextmanager
    def __training(self, resume_from_checkpoint: str | None) -> Iterator[None]:
        """Train within the block; the parts of the trainer begin in this order, and end reversed.

        Signals are followed last and left first, so that none interrupts the end of another part.
        Then the step is flushed, and averages leave the model, while records and the progress bar,
        which shows their lines, are still open. A due evaluation, which an error may have left, is
        forgotten. What follows the data, and the logged loss, ends afterwards. The watch of the
        ranks is around all these parts: it explains an error of any of them. Last, an error waits
        for a checkpoint that is being written.
        """
        self.__watch = rank_watch()
        with (
            self.__checkpoints.background.of_training(),
            contextlib.nullcontext() if self.__watch is None else self.__watch.training(),
            self.__losses.filtering(),
            self.__skip.of_training(),
            self.batch_growth.of_training(),
            self.__position.of_training(resume_from_checkpoint, self.args),
            replaced(self.__evaluation, is_due=False),
            records_of_training(),
            self.run_facts.of_training(),
            self.loss_by_row.of_training(),
            closed_after_error(self.callback_handler.callbacks),
            flushed_at_end(self.attached.attachment, self.callback_handler.callbacks),
            self.__termination,
            explaining_training(self),
        ):
            yield

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        epochs, batches = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        # The loaded state has the batch size of the checkpoint; monitors need the present one.
        self.state.train_batch_size = batch_size_of(self)
        self.loss_by_row.prepare()
        warn_of_undivided_loss(self)
        # Check before the model is wrapped: if the models of the ranks differ, wrapping them in
        # DistributedDataParallel raises an obscure error.
        check_trainer_ranks(
            self,
            self.__step_config,
            max_steps,
            num_update_steps_per_epoch,
            self.__skip.rows.fact,
            self.batch_growth.settings(),
            sources=self.loss_by_row.fact,
            copies_state=self.__checkpoints.background.are_wanted,
        )
        # The Trainer takes `sys.maxsize` epochs of data without a length.
        has_length = num_train_epochs != sys.maxsize
        self.__batch.check_epoch(num_update_steps_per_epoch, has_length=has_length)
        saved = self.__position.saved
        epochs, batches = self.__skip.begin(
            epochs,
            batches,
            None if saved is None else saved["data_skip"],
            max_steps=max_steps,
            updates_per_epoch=num_update_steps_per_epoch,
            num_epochs=num_train_epochs,
            has_length=has_length,
            grown=self.batch_growth.start(self.state.global_step),
        )
        self.batch_growth.check_resumed(saved)
        # The Trainer looks at `max_steps` only after an update, so it would make one more.
        has_ended = self.__checkpoints.ended_early or self.state.global_step >= max_steps
        if has_ended:
            return num_train_epochs, 0
        position = self.__position
        if not has_length and (position.is_placed or position.begins_pass):
            passes, updates, _ = position.done_without_length()
            if position.begins_pass:
                return passes + 1, 0
            return passes, updates * self.args.gradient_accumulation_steps
        if not has_length:
            self.__position.warn_of_repeated_rows(self.args, max_steps)
        return epochs, batches

    def get_train_dataloader(self) -> Any:
        """Return the data loader of the training; with a state, if that is asked for."""
        make = super().get_train_dataloader
        return (
            new_stateful_loader(self.accelerator, make) if self.__position.is_stateful else make()
        )

    def set_initial_training_values(self, args: TrainingArguments, dataloader: Any) -> Any:
        """Return the numbers of updates and epochs of a training; note its data loader."""
        self.__skip.rows.note_loader(dataloader)
        values = super().set_initial_training_values(args, dataloader)
        return self.batch_growth.initial_values(values, dataloader)

    def _run_epoch(self, *args: Any, **kwargs: Any) -> None:
        names = inspect.signature(super()._run_epoch).parameters
        keywords = dict(zip(names, args, strict=False)) | kwargs

        def follow(batches: Iterable[Any]) -> Iterator[Any]:
            return self.__position.watching(self.__skip.batches(batches))

        loader, num_skipped = keywords["train_dataloader"], self.__batch.num_skipped
        keywords["train_dataloader"] = followed_loader(loader, follow, num_skipped=num_skipped)
        moved = self.__skip.of_epoch(keywords, is_placed=self.__position.is_placed)
        if moved is not None:
            super()._run_epoch(**self.batch_growth.of_epoch(moved))  # type: ignore[no-untyped-call]  # (transformers)

    def name_rows(self, source_of: Callable[[int], str | None]) -> None:
        """Tell where the rows of the training data come from, for the anomalies that name rows.

        Args:
            source_of: Returns file and line, or any name, of the row of ``train_dataset`` with an
                index; ``None`` if it is unknown. Called for rows that are named only.
        """
        self.__skip.noted.source_of = source_of

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Any]:
        """Return the micro-batches of an update, and the number of their targets."""
        read = super().get_batch_samples
        if not self.batch_growth.is_on:
            return self.__skip.rows.read(read, epoch_iterator, num_batches, device)
        batches = self.batch_growth.read(read, epoch_iterator, device)
        checkpoint = self.batch_growth.take_delayed()
        if checkpoint is not None:
            self._load_rng_state(checkpoint)
        return batches

    def training_step(
        self, model: nn.Module, inputs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Tensor:
        """Do forward and backward of a micro-batch; return its loss, or 0 if it is non-finite."""
        part = self.__parts.next() if self.__parts.left else Part.ROWS
        if part is Part.NOTHING:
            return self.__losses.of_nothing()
        num_items = args[0] if args else kwargs.get("num_items_in_batch")
        share = self.__losses.begin_micro_batch(inputs, num_items)
        stands_in = part is Part.STAND_IN
        weight = replaced(self.attached.attachment, is_weightless=True) if stands_in else _USUAL
        rows, batch = self.loss_by_row, copy.copy(inputs)
        with weight, rows.watching(model, stands_in=stands_in) if rows.is_on else _UNWATCHED as end:
            try:
                loss: Tensor = super().training_step(model, inputs, *args, **kwargs)
            except Exception as error:
                explain_missing_loss(error, model, self.train_dataset, inputs)
                explain_targets(error, model, batch)
                raise
            end(loss, num_items)
        for monitor in () if stands_in else self.__skip.noted.takers:
            monitor.take_batch(batch)
            monitor.take_loss(loss)
        loss = self.__losses.add(loss, share)
        return torch.zeros_like(loss) if stands_in else loss

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        """Return the loss of a micro-batch; report the further losses of the model's output."""
        if not self.__losses.are_reported:
            # A method of the user's own may have fewer parameters than that of the Trainer.
            return super().compute_loss(*args, **kwargs)
        args, kwargs, returns_outputs = with_outputs(args, kwargs)
        loss, outputs = super().compute_loss(*args, **kwargs)
        if losses := named_losses(outputs):
            self.attached.report_losses(losses)
        return (loss, outputs) if returns_outputs else loss

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,  # noqa: FBT001  (transformers' signature)
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor | None, Any, Any]:
        """Evaluate a batch; rows that only fill up the last batch do not count in the loss."""
        predict = super().prediction_step
        return self.__evaluation.predicted(
            inputs,
            lambda rows, loss_only: predict(model, rows, loss_only, *args, **kwargs),
            loss_only=prediction_loss_only,
            may_gather=evaluates_batches_itself(self, after=MFTrainerMixin),
        )

    @contextlib.contextmanager
    def __evaluating(self) -> Iterator[None]:
        """Evaluate inside the block as the training requests it."""
        model: Any = self.model
        with (
            evaluating(self.callback_handler.callbacks, self.state, model),
            replaced(self.__evaluation, is_of_training=True),
        ):
            yield

    def _evaluate(self, *args: Any, **kwargs: Any) -> Any:
        with self.__evaluating():
            return self.__evaluation.noted(super()._evaluate(*args, **kwargs))

    def __make_evaluation_loader(self) -> Callable[[], Any] | None:
        """Return a function that returns the loader of the first held-out data; None without it."""
        data: Any = self.eval_dataset
        if data is None:
            return None
        name = next(iter(data), None) if isinstance(data, dict) else None
        return functools.partial(self.get_eval_dataloader, name)

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate as the Trainer does, by hand or because the training requests it.

        Args:
            args: Positional arguments of the Trainer's method.
            kwargs: Keyword arguments of the Trainer's method.

        Returns:
            The metrics by name.
        """
        # A subclass may call it in place of `_evaluate` when the training requests an evaluation.
        if not self.__evaluation.is_due or self.__evaluation.is_of_training:
            return super().evaluate(*args, **kwargs)
        with self.__evaluating():
            return self.__evaluation.noted(super().evaluate(*args, **kwargs))

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate; the loss is the mean over the rows of the data set, or over its targets.

        Each of several data sets has its own mean, and so has ``predict``. On several ranks, the
        rows that fill up the last batch do not count in the loss: each rank computes the loss of
        its own rows of that batch in a forward of its own. Logits and labels come from the whole
        batch, as in a stock Trainer. The rows count, as there,

        - if a tensor of the batch is neither one of the labels nor has two dimensions, of which the
          first has one entry for each row (a matrix of another kind with as many rows is cut to the
          rows that count);
        - if the batch has no labels, or lists;
        - if a ``compute_loss`` or ``compute_loss_func`` of your own, which may gather rows of all
          ranks, computes the loss, and `eval_per_token_loss` is not set;
        - if the data are iterable with ``dispatch_batches=False``: their number of rows is unknown.

        With `eval_per_token_loss`, the loss of a batch must be the mean over its targets: a
        ``compute_loss_func`` divides by ``num_items_in_batch``, or by the number of targets in the
        batch. A ``prediction_step`` of your own returns the loss that counts.
        """
        # Schedule-free optimizers convert the weights in `eval`, and back in `train`. They must
        # convert those of the training, not averages that are in the model. The Trainer calls
        # `eval` again, which does nothing, and calls `train` before the next step.
        convert = getattr(self.optimizer, "eval", None)
        if callable(convert):
            with training_weights():
                convert()
        with self.__evaluation.running():
            result: Any = super().evaluation_loop(*args, **kwargs)
            prefix = kwargs.get("metric_key_prefix", args[4] if len(args) > 4 else "eval")
            is_overridden = has_own(self, "prediction_step", before=MFTrainerMixin)
            return self.__evaluation.corrected(
                result, f"{prefix}_loss", is_overridden=is_overridden
            )

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """Log an entry; add the values of the step and the callbacks to training logs."""
        super().log(self.__losses.completed(logs), *args, **kwargs)
        if self.__checkpoints.ending is not None:
            self.__checkpoints.hide()

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        if self.__watch is not None:
            # The Trainer starts a collective next. If another rank has more data, it is still in an
            # update, and both ranks would wait for each other forever.
            self.__watch.end_training()
        self.__checkpoints.background.end()
        run_folder, keeps_last = Path(self._get_output_dir(trial)), self.__termination.is_stopping
        with (
            self.__losses.finishing() as loss,
            self.__checkpoints.finishing(run_folder, keeps_last=keeps_last),
        ):
            result = super()._finalize_training(trial, *args, **kwargs)  # type: ignore[no-untyped-call]  # (transformers)
        if not isinstance(result, TrainOutput):
            return result  # of a method of the user's own
        return TrainOutput(result.global_step, loss, result.metrics | {"train_loss": loss})

    def _get_output_dir(self, trial: Any) -> str:
        return self.__checkpoints.output_folder(super()._get_output_dir(trial))

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """Save the model as the Trainer does; within an evaluation, save the training's weights.

        Inside a block of ``ema.swap()`` of your own, save the averages.
        """
        is_held = self.__evaluation.is_of_training
        with training_weights(leaves_nested=True) if is_held else _USUAL:
            super().save_model(*args, **kwargs)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.__checkpoints.background.settle(waits=True)
        with replaced(self.__checkpoints, hides_checkpoints=False):
            run_folder = Path(self._get_output_dir(trial))
        with training_weights(), self.__checkpoints.writing(run_folder):
            super()._save_checkpoint(model, trial)

    def _save(self, output_dir: str | None = None, *args: Any, **kwargs: Any) -> None:
        with (
            self.__checkpoints.keeping_weight_names(),
            self.__checkpoints.users_arguments(),
            without_saved_token(self.args),
        ):
            save = functools.partial(super()._save, output_dir, *args, **kwargs)
            deferred = self.__checkpoints.deferred
            if deferred is None or output_dir is None or args or kwargs:
                save()
            else:
                deferred.save_weights(Path(output_dir), save)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save = functools.partial(super()._save_optimizer_and_scheduler, output_dir)
        if self.__checkpoints.deferred is None:
            save()
        else:
            self.__checkpoints.deferred.save_optimizer(Path(output_dir), save)

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Write the model's card as the Trainer does; add the settings of the step."""
        with extended_card(self):
            super().create_model_card(*args, **kwargs)

    def _save_scaler(self, output_dir: str) -> None:
        folder = Path(output_dir)
        if self.attached.attachment.has_grad_scaler:
            super()._save_scaler(output_dir)
        if self.__checkpoints.deferred is None:
            save_step(folder, self.attached.attachment, each_node=self.args.save_on_each_node)
        else:
            self.__checkpoints.deferred.save_step(folder)
        self.__position.save(
            folder,
            self.args,
            self.__losses.state_dict,
            {
                "global_batch": self.__batch.state_dict(),
                "data_skip": self.__skip.state_dict(),
                "samples": self.batch_growth.state_dict(),
                "loss_by": self.loss_by_row.state_dict(),
                "optimizer_settings": self.__optimizer_settings.state_dict(),
            },
        )
        save_attributes(self, folder)
        save_outer_weights(self, folder)

    def _load_from_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        # A method of the user's own may call its first argument otherwise, and take no `model`.
        model = args[1] if len(args) > 1 else kwargs.get("model")
        named = (value for name, value in kwargs.items() if name != "model")
        checkpoint = args[0] if args else next(named)
        check_sharded_load(self.accelerator)
        is_new = model is None and self.optimizer is None
        if model is None:
            # The Trainer loads the weights first and the optimizer later. Check the optimizer
            # before the weights are loaded, so that a checkpoint that does not fit changes nothing.
            self.create_optimizer()
            loads_itself = loads_weights_itself(self, after=MFTrainerMixin)
            self.__checkpoints.check_loaded(Path(checkpoint), loads_itself=loads_itself)
        network: Any = self.model
        before, adapters = set(network.parameters()), adapters_of(network)
        dtypes = {name: parameter.dtype for name, parameter in network.named_parameters()}
        if not loads_weights_itself(self) and is_in_original_format(Path(checkpoint), network):
            load_original_format(Path(checkpoint), network)
        else:
            super()._load_from_checkpoint(*args, **kwargs)
            drop_loaded_average(network, adapters)
        for name, parameter in network.named_parameters():
            # PEFT loads an adapter in float32, also one that TRL trains in bfloat16.
            if parameter.dtype != (dtype := dtypes.get(name, parameter.dtype)):
                parameter.data = parameter.data.to(dtype)
        if is_new and before != set(network.parameters()):
            # The model replaces parameters when it is loaded: the Trainer makes a new optimizer.
            self.optimizer = None

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        let_cpu_ranks_load()
        self.__optimizer_settings.note(self.optimizer)
        if checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        schedule = ContinuedSchedule(self.lr_scheduler)
        loading = replaced(self, lr_scheduler=schedule)
        with replaced(self.attached.attachment, is_loading=True), loading:
            super()._load_optimizer_and_scheduler(checkpoint)
        saved = (self.__position.saved or {}).get("optimizer_settings")
        self.__optimizer_settings.apply(self.optimizer, schedule, saved)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            load_step(Path(checkpoint), self.attached.attachment)

    def _load_callback_state(self) -> None:
        self.__checkpoints.restore_callbacks(self.__position.resumed_from)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if (
            checkpoint is None
            or checkpoint == NO_CHECKPOINT
            or self.batch_growth.delays_random_states
        ):
            return
        self.__position.restore_random_states(checkpoint, super()._load_rng_state)

    def _mfwrap_before_event(self, event: str) -> bool:
        """Bring the log and the data position up to date before callbacks are called.

        Returns:
            Whether the callbacks hear of the event. They do not hear of empty micro-batches, and
            later of a checkpoint that is being written.
        """
        self.__losses.end_micro_batch()
        self.__evaluation.is_due &= event in _EVALUATION_EVENTS
        if event == "on_train_begin":
            self.__begin_training()
        elif event == "on_epoch_begin":
            self.__begin_epoch()
        elif event == "on_step_begin":
            self.__begin_step()
        elif event == "on_pre_optimizer_step":
            if self.__skip.rows.are_followed or self.batch_growth.is_on:
                self.__parts.check_update()
        elif event == "on_save":
            self.__checkpoints.adopt()
            return not self.__checkpoints.background.is_pending
        elif event == "on_train_end":
            self.__checkpoints.end()
        elif event == "on_step_end":
            self.__end_step()
        return event != "on_substep_end" or self.__parts.present is not Part.NOTHING

    def _mfwrap_after_event(self, event: str, control: TrainerControl) -> None:
        """Note a requested evaluation, go back to a checkpoint, or note the one saved next."""
        if event in {"on_step_end", "on_epoch_end"}:
            self.__evaluation.is_due = control.should_evaluate
        elif event == "on_save":
            # The signal may have come during the save, which may take long.
            control.should_training_stop |= self.__termination.stops_after_save()
        if self.rollbacks.are_on:
            self.rollbacks.after_event(event, control)
        if control.should_save:
            self.__checkpoints.note_own()

    def __begin_training(self) -> None:
        for callback in monitors(self.callback_handler.callbacks):
            callback.expect_evaluations()
            callback.expect_background_saves()
            callback.take_evaluation_loader(self.__make_evaluation_loader())
        # The Trainer has loaded weights, optimizer and schedule. It passes over files that are
        # missing, so an absent file would be a fresh start.
        if self.__checkpoints.is_loading:
            self.__checkpoints.check_unchanged(is_last=False)
        self.__checkpoints.restore_records(self.__position.resumed_from)
        if self.__position.resumed_from is not None:
            if self.state.is_world_process_zero:
                step = f"step {self.state.global_step} of {self.state.max_steps}"
                self.say_resume(f"resuming from {self.__position.resumed_from}, {step}")
            for callback in monitors(self.callback_handler.callbacks):
                callback.resume_from(self.__position.resumed_from)
        self.__optimizer_settings.note(self.optimizer)
        self.rollbacks.begun()
        self.__checkpoints.background.begin()
        self.__skip.noted.begin()
        self.batch_growth.tell_monitors()
        self.attached.attachment.step.rate_factor = 1.0
        self.__losses.begin(self.__position.saved)
        self.loss_by_row.begin(self.__position.saved)
        if self.__position.resumed_from is not None:
            restore_attributes(self, self.__position.resumed_from)
            restore_outer_weights(self, self.__position.resumed_from)

    def __begin_epoch(self) -> None:
        loader = self.callback_handler.train_dataloader
        is_resumed = self.__position.resumed_from is not None
        start = self.__skip.begin_epoch(
            loader, self.batch_growth.first_slots, is_resumed=is_resumed
        )
        self.__batch.begin_epoch(loader, start)
        self.__position.begin_epoch(
            loader,
            super()._load_rng_state,
            epoch=self.state.epoch,
            skips_data=not self.args.ignore_data_skip and not self.__skip.is_moved,
        )

    def __end_step(self) -> None:
        if self.__skip.rows.are_followed:
            self.__skip.count_update()
        if self.batch_growth.is_on:
            self.batch_growth.end_update()
        report = self.attached.attachment.last_report
        if report is not None:
            self.__losses.step_log.count(report)

    def __begin_step(self) -> None:
        # Callbacks and random generators have loaded their states since the training began.
        if self.__checkpoints.is_loading:
            self.__checkpoints.check_unchanged(is_last=True)
        self.__checkpoints.background.settle()
        if self.__watch is not None:
            self.__watch.begin_update()
        if self.rollbacks.may_slow:
            factor = self.rollbacks.rate_factor(self.state.global_step + 1)
            self.attached.attachment.step.rate_factor = factor


def loop_settings(config: StepConfig, args: TrainingArguments) -> StepConfig:
    """Return the settings of the step, with accumulation left to the Trainer.

    Raises:
        ValueError: If a setting contradicts `args`.
    """
    if config.calculate_per_token_loss:
        msg = (
            "`calculate_per_token_loss` must be False in a Trainer, which divides by the number "
            "of tokens itself, got True"
        )
        raise ValueError(msg)
    defaults = {"gradient_accumulation_steps": 1, "max_grad_norm": StepConfig().max_grad_norm}
    for name, default in defaults.items():
        value, expected = getattr(config, name), getattr(args, name)
        if value not in (default, expected):
            msg = (
                f"`{name}` of `step` must be {default}, the default, or {expected}, the value in "
                f"the training arguments, got {value}"
            )
            raise ValueError(msg)
    check_micro_batches(config, args, args.gradient_accumulation_steps)
    # The Trainer itself counts micro-batches; the accelerator must not count them again.
    return dataclasses.replace(config, gradient_accumulation_steps=1)


def _check_attributes(trainer: MFTrainerMixin) -> None:
    """Refuse a trainer whose subclass has put something else in an attribute of the mixin."""
    for name, kind in _OWN.items():
        found = getattr(trainer, name)
        if not isinstance(found, kind):
            owner = type(trainer).__name__
            msg = (
                f"`self.{name}` is an attribute of MFTrainerMixin and must be a {kind.__name__}, "
                f"got {described(found)}; give the attribute of {owner} another name"
            )
            raise TypeError(msg)
