"""How the Trainer saves, and takes over what was saved."""

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint, sort_checkpoints

from mfwrap.accelerate.attached_step import AttachedStep
from mfwrap.checkpoints.folders import complete_move, remove_checkpoints
from mfwrap.checkpoints.manifest import check_checkpoint
from mfwrap.tensors.wrappers import unwrapped_optimizer
from mfwrap.termination import RankTermination
from mfwrap.trainer.checkpoint import (
    StagedCheckpoint,
    TrainerPosition,
    check_average,
    check_parameter_groups,
)
from mfwrap.trainer.data_position import DataPosition
from mfwrap.trainer.events import restore_in_place

__all__ = ["CheckpointMixin"]

if TYPE_CHECKING:
    # What the mixin is mixed in before has the Trainer's methods.
    from transformers import Trainer as _Base
else:
    _Base = object


class CheckpointMixin(_Base):
    """The part of `MFTrainerMixin` that has to do with checkpoints."""

    attached: AttachedStep
    _termination: RankTermination
    _position: TrainerPosition | None
    _data_position: DataPosition
    _staged: StagedCheckpoint | None
    _saved_step: int | None
    _keeps_average: bool

    # To resume

    def train(
        self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train as the Trainer does; a checkpoint to resume from must be whole, and fit.

        Raises:
            ValueError: If it is not whole, and the newest whole one before it is named; or if it
                has an average, and this trainer has none. Nothing has been loaded then.
        """
        if resume_from_checkpoint:
            resume_from_checkpoint = self._checked_checkpoint(resume_from_checkpoint, trial)
        return super().train(resume_from_checkpoint or None, trial, *args, **kwargs)

    def _checked_checkpoint(self, asked_for: Any, trial: Any) -> Any:
        is_last = asked_for is True
        run_folder = Path(str(self.args.output_dir)) if is_last else Path(asked_for).parent
        if self.args.local_process_index == 0:
            complete_move(run_folder)
        self.accelerator.wait_for_everyone()
        checkpoint = get_last_checkpoint(self.args.output_dir) if is_last else asked_for
        if checkpoint is None:
            msg = f"`output_dir` must hold a checkpoint, got {self.args.output_dir} with none"
            raise ValueError(msg)
        # What a trial makes may be another network.
        check_checkpoint(Path(checkpoint), self.model if trial is None else None)
        check_average(Path(checkpoint), is_given=self._keeps_average)
        return checkpoint

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        if model is None:
            # The optimizer is loaded when the weights have been.
            self.create_optimizer()
            optimizer: Any = self.optimizer
            check_parameter_groups(Path(resume_from_checkpoint), unwrapped_optimizer(optimizer))
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        self.attached.is_loading = True
        try:
            super()._load_optimizer_and_scheduler(checkpoint)
        finally:
            self.attached.is_loading = False

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is not None:
            self.attached.load_files(Path(checkpoint))

    def _load_callback_state(self) -> None:
        restore_in_place(self.callback_handler.callbacks, self.state.stateful_callbacks or {})
        self._forget_saved_states()

    # To save

    def _get_output_dir(self, trial: Any) -> str:
        folder = super()._get_output_dir(trial)
        return folder if self._staged is None else str(self._staged.folder)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        self.attached.flush()
        self._forget_saved_states()
        self._staged = StagedCheckpoint(self, Path(self._get_output_dir(trial)))
        try:
            with self._staged:
                super()._save_checkpoint(model, trial)
        finally:
            staged, self._staged = self._staged, None
        staged.finish()
        self._saved_step = self.state.global_step

    def _save(self, *args: Any, **kwargs: Any) -> None:
        if self._staged is None or not isinstance(self.model, PreTrainedModel):
            super()._save(*args, **kwargs)
            return
        model: Any = self.model
        # Under the network's own names: the Trainer loads a checkpoint without converting names.
        save = functools.partial(model.save_pretrained, save_original_format=False)
        instead: dict[str, Any] = {"save_pretrained": save}
        if self.args.save_on_each_node:
            # Left to itself, only rank 0 of all nodes writes weights, whatever it is asked.
            instead["should_save_on_this_rank"] = bool
        vars(model).update(instead)
        try:
            super()._save(*args, **kwargs)
        finally:
            for name in instead:
                del vars(model)[name]

    def _save_scaler(self, output_dir: str) -> None:
        if self.attached.has_grad_scaler:
            super()._save_scaler(output_dir)
        self.attached.save_files(Path(output_dir), each_node=self.args.save_on_each_node)
        if self._position is not None:
            self._position.save(Path(output_dir), self, self._data_position)

    def _forget_saved_states(self) -> None:
        """Make room for the states of the callbacks that there are, in the form the Trainer fills.

        It appends to a list that is there, and fails on a callback that is not.
        """
        exporting = [*self.callback_handler.callbacks, self.control]
        names = [type(one).__name__ for one in exporting if isinstance(one, ExportableState)]
        rooms: Any = {name: [] if names.count(name) > 1 else {} for name in names}
        self.state.stateful_callbacks = rooms

    def _finalize_training(self, trial: Any, *args: Any, **kwargs: Any) -> Any:
        limit = self.args.save_total_limit
        # With a limit of 1 the Trainer deletes all but the best one, file by file.
        self.args.save_total_limit = None
        try:
            result = super()._finalize_training(trial, *args, **kwargs)  # type: ignore[no-untyped-call]
        finally:
            self.args.save_total_limit = limit
        # A run that was told to end goes on from its last one.
        if limit == 1 and self.args.should_save and not self._termination.is_stopping:
            self._remove_all_but_best(trial)
        return result

    def _remove_all_but_best(self, trial: Any) -> None:
        best, run_folder = self.state.best_model_checkpoint, self._get_output_dir(trial)
        if best is not None:
            folders = sort_checkpoints(output_dir=run_folder, best_model_checkpoint=best)
            others = [Path(each) for each in folders if not Path(each).samefile(best)]
            remove_checkpoints(others, Path(run_folder))
