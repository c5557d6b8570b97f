"""Check, write and remove a Trainer's checkpoints."""

import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, final

import torch
from torch.optim import Optimizer
from transformers import PreTrainedModel, TrainerState
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import get_last_checkpoint

from mfwrap.accelerate.attributes import replaced
from mfwrap.accelerate.state import has_average
from mfwrap.arguments import takes
from mfwrap.checkpoints.beside import move_back, show_files
from mfwrap.checkpoints.file_formats import DamagedFileError
from mfwrap.checkpoints.identities import Identity, check_unchanged
from mfwrap.checkpoints.manifest import MANIFEST, Verified, write_manifest
from mfwrap.checkpoints.network_weights import (
    foreign_weights,
    is_in_original_format,
    load_original_format,
)
from mfwrap.checkpoints.ownership import owning_run
from mfwrap.checkpoints.required_files import TRAINER_STATE
from mfwrap.checkpoints.resumption import AUTO, find_checkpoint
from mfwrap.checkpoints.run_folders import (
    checkpoints_of_run,
    remove_checkpoints,
    set_aside_later_checkpoints,
    step_of_checkpoint,
)
from mfwrap.checkpoints.step_files import apart
from mfwrap.checkpoints.verification import (
    check_checkpoint,
    is_checkpoint,
    newest_whole_checkpoint,
    verify,
)
from mfwrap.checkpoints.whole import (
    adopt_files,
    check_writable,
    clear_staging,
    move_into_place,
    staging_folder,
)
from mfwrap.checkpoints.write_errors import naming_written_file
from mfwrap.checkpoints.written_files import note_written
from mfwrap.collectives import gather_objects, raising_together
from mfwrap.compatibility.transformers import (
    loads_weights_itself,
    output_folder_of,
    push_checkpoint,
    saves_checkpoints_itself,
    saves_optimizer_itself,
    saves_weights_itself,
)
from mfwrap.records.checkpoint_requests import CheckpointRequests
from mfwrap.records.own_names import (
    CHECKPOINT,
    begin_folder,
    check_own,
    is_own_checkpoint,
    own_checkpoints,
    refuse_others,
)
from mfwrap.records.rollbacks import ROLLBACKS_FILE
from mfwrap.records.run_facts import PROGRESS
from mfwrap.records.run_files import resume_run, save_records
from mfwrap.records.run_record import FACTS
from mfwrap.tensors.wrappers import unwrapped_optimizer
from mfwrap.trainer.background import BackgroundSaves
from mfwrap.trainer.deferred_files import DeferredFiles
from mfwrap.trainer.events import finish_pending, monitors, restore_in_place
from mfwrap.trainer.hub_token import without_saved_token
from mfwrap.trainer.lookalikes import lookalike
from mfwrap.trainer.rollback import SKIP_ROWS_FILE
from mfwrap.trainer.stops import had_ended
from mfwrap.trainer.view import TrainerView, run_folder_of, trains_shards

_LOG = logging.getLogger(__name__)
_TRAINERS_LOG = logging.getLogger("transformers.trainer")
"""Logger of the Trainer, for warnings that a stock Trainer gives, too."""


@final
class Checkpoints:
    """Check, write and remove the checkpoints of an `MFTrainer`.

    A checkpoint is written to a staging folder in the run folder and renamed when it is complete.
    So a crash never leaves a partial checkpoint in a folder that is named like a checkpoint.

    Args:
        trainer: The trainer that writes the checkpoints.
        keeps_average: Whether the trainer keeps an average of the weights.
        in_background: Whether the trainer was asked to save in the background.
    """

    def __init__(
        self, trainer: TrainerView, *, keeps_average: bool, in_background: bool = False
    ) -> None:
        self._trainer = trainer
        self._keeps_average = keeps_average
        self.requests = CheckpointRequests()
        """Requests for checkpoints of other programs."""
        self.background = BackgroundSaves(trainer, is_wanted=in_background)
        """Checkpoints that are written while the training goes on."""
        self.deferred: DeferredFiles | None = None
        """Large files of the checkpoint that is being written, if this rank writes them later."""
        self._staging: Path | None = None
        """Folder in which a checkpoint is being written; ``None`` at any other time."""
        self.ending: Callable[[], None] | None = None
        """What is left to do in `finishing`; ``None`` at any other time."""
        self._best_files: Mapping[str, Identity] = {}
        self.hides_checkpoints = False
        """Whether the Trainer gets a folder without checkpoints, so that it removes none."""
        self._pushes = False
        self.saved_step: int | None = None
        """Step of the last checkpoint of this training; ``None`` before the first one."""
        self._is_auto = False
        self._writes = False
        self.is_loading = False
        """Whether a checkpoint is being loaded: from its verification to the first step."""
        self._checked: Path | None = None
        self._verified: tuple[Path, Mapping[str, Identity]] | None = None
        """Checkpoint to resume from, and its files, on the rank of each node that verifies it."""
        self.ended_early = False
        """Whether ``"auto"`` has found a training that early stopping had ended. (Another callback
        that ends a training, for example when its time is over, may want it to continue.)"""

    @contextlib.contextmanager
    def owning_run_folder(self, asked_for: Any, trial: Any) -> Iterator[None]:
        """Own the run folder within the block, and check that all ranks can write to it.

        Does nothing if neither the Trainer saves checkpoints nor a callback is a `MonitorCallback`.

        Args:
            asked_for: Checkpoint to resume from. With ``"auto"``, the owner may be a machine that
                has died: it then gets three minutes to show that it lives.
            trial: Trial of a hyperparameter search, which has a run folder of its own.

        Raises:
            BlockingIOError: On all ranks, if another program trains in the folder.
            FileExistsError: On all ranks, if the training would replace files in the folder that no
                training of mfwrap has written.
            OSError: On all ranks, if any rank cannot write.
        """
        self.ended_early = self.is_loading = False  # of an earlier training
        self._checked = None
        args = self._trainer.args
        # A rank that has none takes part: `check_trainer_ranks` then says how the ranks differ.
        has_monitors = any(gather_objects(bool(monitors(self._trainer.callback_handler.callbacks))))
        self._writes = args.save_strategy != "no" or has_monitors
        folder = Path(output_folder_of(self._trainer, trial))
        with contextlib.ExitStack() as stack:
            if self._writes:
                stack.enter_context(owning_run(folder, waits=asked_for == AUTO))
                with raising_together():
                    check_writable(run_folder_of(self._trainer))
                    if args.local_process_index == 0:
                        _check_own(
                            self._trainer, folder, has_monitors=has_monitors, is_new=not asked_for
                        )
                stack.enter_context(contextlib.closing(self.requests.open(folder)))
            try:
                yield
            except Exception:
                # Another program may delete the checkpoint while it is being loaded.
                if self.is_loading:
                    _refuse_changed(self._verified)
                raise

    def checked(self, asked_for: Any, trial: Any) -> Any:
        """Find the checkpoint to resume from, and check that it is intact and fits the trainer.

        One rank of each node reads the checkpoint. All ranks raise the same error, or none.

        Args:
            asked_for: Folder of a checkpoint, ``True`` for the newest checkpoint of the run, or
                ``"auto"`` for the newest one that is intact.
            trial: Trial of a hyperparameter search; ``None`` for an ordinary training.

        Returns:
            The folder; ``None`` for ``"auto"`` if the run has no checkpoints.

        Raises:
            ValueError: If there is no checkpoint, if it is damaged or incomplete or belongs to
                another network, if it holds an average but the trainer keeps no average, or if the
                newest checkpoints of the nodes differ.
        """
        found = self._verified = None
        self.is_loading = True
        self._is_auto = asked_for == AUTO
        with raising_together():
            if self._trainer.args.local_process_index == 0:
                found = self._intact(asked_for, trial)
        names = sorted({name for name in gather_objects(found) if name is not None})
        run_folder = run_folder_of(self._trainer)
        if len(names) > 1 and asked_for == AUTO and all(names):
            # Nodes with disks of their own: the run was killed after one node had saved. Every node
            # has the older checkpoint, or all of them raise an error.
            oldest = min(names, key=lambda name: int(name.rpartition("-")[2]))
            return self.checked(str(run_folder / oldest), trial)
        if len(names) > 1:
            shown = ", ".join(name or "no checkpoint" for name in names)
            msg = (
                f"the nodes must resume from the same checkpoint, but they have {shown} "
                "as their newest; set `resume_from_checkpoint` to a checkpoint that all of them "
                "have"
            )
            raise ValueError(msg)
        if asked_for is True or asked_for == AUTO:
            asked_for = str(run_folder / names[0]) if names[0] else None
        self._checked = None if asked_for is None else Path(asked_for)
        return asked_for

    def _intact(self, asked_for: Any, trial: Any) -> str:
        """Return the name of the checkpoint to resume from, after all checks; empty for none."""
        trainer = self._trainer
        is_last = asked_for is True or asked_for == AUTO
        run_folder = run_folder_of(trainer) if is_last else Path(asked_for).parent
        # In a trial, do not compare the checkpoint with the current network: `model_init` may build
        # a different network for the trial.
        is_compared = trial is None and not loads_weights_itself(trainer)
        refusal = functools.partial(_foreign_weights, trainer) if is_compared else None
        found = asked_for
        if asked_for == AUTO:
            newest = find_checkpoint(run_folder, refusal=refusal, required=[TRAINER_STATE])
            if newest is None:
                _refuse_others_checkpoints(run_folder, after=-1)
                return ""
            return self._accepted(*newest)
        if is_last:
            found = get_last_checkpoint(str(run_folder)) if run_folder.is_dir() else None
        if found is None:
            msg = (
                f"No valid checkpoint found in output directory ({run_folder}); leave "
                "`resume_from_checkpoint` out to train from the start"
            )
            raise ValueError(msg)
        checkpoint = Path(found)
        verified = check_checkpoint(checkpoint, refusal, required=[TRAINER_STATE])
        return self._accepted(checkpoint, verified)

    def _accepted(self, checkpoint: Path, verified: Verified) -> str:
        if not self._keeps_average and has_average(checkpoint):
            msg = (
                f"cannot resume from {checkpoint}: it holds an average of the weights, but `ema` "
                "is None; give the trainer the `ema` that the checkpoint was written with"
            )
            raise ValueError(msg)
        run_folder = run_folder_of(self._trainer)
        if checkpoint.parent.resolve() != run_folder.resolve():
            _refuse_others_checkpoints(run_folder, after=-1)
        elif CHECKPOINT.fullmatch(checkpoint.name):
            _refuse_others_checkpoints(run_folder, after=step_of_checkpoint(checkpoint))
        self._verified = checkpoint, verified.identities
        return checkpoint.name

    def check_unchanged(self, *, is_last: bool) -> None:
        """Check on all ranks that the checkpoint that is being loaded is the one that was verified.

        Call it if `is_loading`.

        Args:
            is_last: Whether everything has been loaded.

        Raises:
            ValueError: On all ranks, if another program has deleted or changed a file of it.
        """
        self.is_loading = not is_last
        with raising_together():
            _refuse_changed(self._verified)

    def check_loaded(self, folder: Path, *, loads_itself: bool) -> None:
        """Check a checkpoint whose weights and optimizer are about to be loaded.

        Args:
            folder: Folder of the checkpoint.
            loads_itself: Whether a method of the user's own loads the weights.

        Raises:
            ValueError: If the optimizer of the checkpoint has other parameter groups, or if its
                weights belong to another network, and the Trainer's method loads them.
        """
        trainer = self._trainer
        # `checked` has not compared the weights if a method of the user's own calls the Trainer's.
        is_unchecked = loads_weights_itself(trainer) and not loads_itself
        if is_unchecked and (reason := _foreign_weights(trainer, folder)):
            msg = f"cannot load {folder}: {reason}"
            raise ValueError(msg)
        if not saves_optimizer_itself(trainer):
            check_parameter_groups(folder, unwrapped_optimizer(trainer.optimizer))

    def restore_records(self, checkpoint: Path | None) -> None:
        """Truncate the record files of the run to their lengths at a checkpoint, on every rank.

        If the run folder has checkpoints of later steps, they are renamed first: the run is about
        to repeat these steps, and their records are removed.

        Args:
            checkpoint: Checkpoint that the training resumes from; ``None`` for a training from the
                start, and for one whose loop is a method of the user's own.

        Does nothing if the training neither saves nor records, and another program owns the folder.
        """
        run_folder = run_folder_of(self._trainer)
        with contextlib.ExitStack() as stack:
            if not self._writes and gather_objects(bool(checkpoints_of_run(run_folder)))[0]:
                # A callback may save, although the settings of this training do not.
                try:
                    stack.enter_context(owning_run(run_folder))
                except BlockingIOError:
                    return  # another program trains in the folder; leave it alone
            self._restore_records(run_folder, checkpoint or self._checked)

    def _restore_records(self, run_folder: Path, checkpoint: Path | None) -> None:
        step = self._trainer.state.global_step
        if checkpoint is None:
            self._set_aside_later(run_folder, 0, f"training from the start in {run_folder}")
        else:
            is_inside = checkpoint.parent.resolve() == run_folder.resolve()
            if is_inside and CHECKPOINT.fullmatch(checkpoint.name):
                self._find_best(run_folder / checkpoint.name)
                does = f"resuming from {checkpoint}, which is not the newest of its folder"
                self._set_aside_later(run_folder, step_of_checkpoint(checkpoint), does)
            resume_run(checkpoint, run_folder, step)
            if is_inside and self._trainer.args.should_save:
                # The earlier process may have been killed after it saved a checkpoint and before it
                # removed the old ones. Remove them now.
                best = self._trainer.state.best_model_checkpoint
                self._remove_old(run_folder, kept=checkpoint, best=best)

    def _set_aside_later(self, run_folder: Path, step: int, does: str) -> None:
        if self._trainer.args.local_process_index == 0:
            own = own_checkpoints(run_folder)
            aside = [path.name for path in set_aside_later_checkpoints(own, step)]
            if aside:
                said = "later checkpoints have been renamed to"
                _LOG.warning("%s; %s %s", does, said, ", ".join(aside))
        self._trainer.accelerator.wait_for_everyone()

    def restore_callbacks(self, checkpoint: Path | None) -> None:
        """Restore the callbacks from the trainer state that was loaded from a checkpoint.

        Each `MonitorCallback` is restored. Other callbacks and the trainer's control are restored
        if ``restore_callback_states_from_checkpoint`` is set; a warning then names the classes of
        saved callbacks that the trainer does not have.

        Args:
            checkpoint: The checkpoint; ``None`` if it is unknown.

        Raises:
            TypeError: If the constructor of a callback does not take its saved arguments.
        """
        trainer = self._trainer
        saved: Any = trainer.state.stateful_callbacks or {}
        callbacks = trainer.callback_handler.callbacks
        self.ended_early = self._is_auto and had_ended(saved, callbacks)
        exporting = [*callbacks, trainer.control]
        restores_all = trainer.args.restore_callback_states_from_checkpoint
        if restores_all:
            names = {type(each).__name__ for each in exporting}
            if missing := [name for name in saved if name not in names]:
                _TRAINERS_LOG.warning(
                    "Checkpoint included callbacks not included in current configuration. "
                    "Ignoring. (%s)",
                    ", ".join(missing),
                )
        restore_in_place(
            exporting,
            saved,
            includes_others=restores_all,
            # `MFTrainer` writes only the newest states, and a manifest.
            is_appended=checkpoint is None or not (checkpoint / MANIFEST).is_file(),
        )
        self._clear_callback_states()

    def _clear_callback_states(self) -> None:
        """Make an empty entry for each callback's state, in the form that the Trainer expects.

        At each save the Trainer appends states to the existing lists, so lists that are not emptied
        would grow. The Trainer raises KeyError for a callback without an entry, for example a
        callback that was added after a resume.
        """
        trainer = self._trainer
        exporting = [*trainer.callback_handler.callbacks, trainer.control]
        names = [type(each).__name__ for each in exporting if isinstance(each, ExportableState)]
        entries: Any = {name: [] if names.count(name) > 1 else {} for name in names}
        trainer.state.stateful_callbacks = entries

    @contextlib.contextmanager
    def writing(self, run_folder: Path) -> Iterator[None]:
        """Let the Trainer write a checkpoint within the block, and then move it into place.

        The step and the callbacks' pending work are finished first. Within the block, the Trainer
        does not push the checkpoint to the Hub and does not remove old checkpoints. Both are done
        after the checkpoint is in place.

        Args:
            run_folder: Folder of the run's checkpoints.
        """
        with contextlib.ExitStack() as owned:
            # A training without checkpoints is stopped with one.
            owned.enter_context(owning_run(run_folder))
            yield from self._writing(run_folder, owned)

    def _writing(self, run_folder: Path, owned: contextlib.ExitStack) -> Iterator[None]:
        trainer, args = self._trainer, self._trainer.args
        trainer.attached.flush()
        finish_pending(trainer)
        self._clear_callback_states()
        name = f"checkpoint-{trainer.state.global_step}"
        staging = staging_folder(run_folder / name)
        with raising_together():
            if args.local_process_index == 0:
                # Without settings that save, nobody has looked for others' checkpoints before.
                final = run_folder / name
                if os.path.lexists(final) and not is_own_checkpoint(final):
                    refuse_others([final])
                clear_staging(staging)
        with raising_together():
            if args.local_process_index == 0:
                staging.mkdir(parents=True, exist_ok=True)
                if saves_checkpoints_itself(trainer):
                    show_files(run_folder, staging)
        is_later = self.background.are_on()
        with naming_written_file(staging / name), contextlib.ExitStack() as copied:
            with raising_together():
                if is_later and args.should_save:
                    self.deferred = copied.enter_context(self.background.copied())
            deferred, self._staging = self.deferred, staging
            try:
                self._pushes = args.push_to_hub
                with replaced(args, push_to_hub=False):
                    yield
            finally:
                self._staging = self.deferred = None
            # Another rank may still write beside the checkpoint.
            is_there = any(gather_objects((staging / name).is_dir()))
            if args.should_save:
                move_back(staging, run_folder, but=name)
            if is_there:
                self._finish(staging / name, run_folder / name)
                self._hand_over(
                    staging / name, run_folder / name, deferred, owned if is_later else None
                )
                self.saved_step = trainer.state.global_step
                # Before `on_save`, which comes steps later if the thread writes the checkpoint.
                self.requests.saved((run_folder / name).absolute())

    def _hand_over(
        self,
        written: Path,
        final: Path,
        deferred: DeferredFiles | None,
        owned: contextlib.ExitStack | None,
    ) -> None:
        """Put a checkpoint into place, or let the thread do so.

        Args:
            written: Folder in which the checkpoint was written.
            final: Folder that it gets.
            deferred: What is not written yet; ``None`` if nothing is.
            owned: Owns the run folder, for the thread; ``None`` to do it now.
        """
        trainer, writes = self._trainer, self._trainer.args.should_save
        best = trainer.state.best_model_checkpoint
        put = functools.partial(self._put, written, final, best, deferred)
        complete = functools.partial(self._complete, written, final)
        if owned is not None:
            self.background.submit(put if writes else None, complete, owned.pop_all())
            return
        if writes:
            put()
        trainer.accelerator.wait_for_everyone()
        complete()

    def note_own(self) -> None:
        """Note the checkpoint that the user's own ``_save_checkpoint`` is about to write.

        Such a method may write to the run folder itself, and be killed before the checkpoint has a
        file of mfwrap. The list of the run folder then tells that it belongs to the training.
        """
        trainer = self._trainer
        if trainer.args.local_process_index == 0 and saves_checkpoints_itself(trainer):
            run_folder = run_folder_of(trainer)
            # The other ranks do not learn of an error here. The user's method gets it as well.
            with contextlib.suppress(OSError):
                begin_folder(run_folder)
                note_written(run_folder / f"checkpoint-{trainer.state.global_step}")

    def adopt(self) -> None:
        """Write the manifest of a checkpoint that the user's own ``_save_checkpoint`` has written.

        Such a method may write to the run folder itself. Call it when the checkpoint is written.
        """
        trainer = self._trainer
        step = trainer.state.global_step
        if self.saved_step == step:
            return
        self.saved_step = step
        folder = run_folder_of(trainer) / f"checkpoint-{step}"
        if trainer.args.should_save and is_checkpoint(folder):
            write_manifest(folder)

    def _finish(self, written: Path, final: Path) -> None:
        """Write what is left of a checkpoint, apart from its large files and the manifest."""
        trainer, args = self._trainer, self._trainer.args
        for callback in monitors(trainer.callback_handler.callbacks):
            callback.save_into(written, args, trainer.model)
        save_records(written, final.parent)
        self._find_best(final)
        trainer.accelerator.wait_for_everyone()
        if args.should_save:
            trainer.state.save_to_json(str(written / TRAINER_STATE))
            if str(final) == trainer.state.best_model_checkpoint:
                self._best_files = {}  # a callback has saved the checkpoint again

    def _put(
        self, written: Path, final: Path, best: str | None, deferred: DeferredFiles | None
    ) -> None:
        """Write large files and the manifest, move a checkpoint into place, and remove old ones.

        Any thread may call this.
        """
        with naming_written_file(written):
            write_manifest(written, known=None if deferred is None else deferred.write())
            # This call syncs all files to disk before it renames the checkpoint.
            move_into_place(written, final)
            self._remove_old(final.parent, kept=final, best=best)

    def _complete(self, written: Path, final: Path, state: TrainerState | None = None) -> None:
        """Take over a checkpoint that is in place, and push it to the Hub if enabled.

        Args:
            written: Folder in which the checkpoint was written.
            final: Folder in which it is.
            state: State of its step, if the training has gone on meanwhile.
        """
        trainer, args = self._trainer, self._trainer.args
        if args.local_process_index == 0 and not args.should_save:
            adopt_files(written, final)
        if args.push_to_hub:
            with without_saved_token(args), replaced(trainer, state=state or trainer.state):
                push_checkpoint(trainer, str(final))
        if state is not None:
            # The Trainer holds the control itself while an event is handled.
            changed = trainer.callback_handler.tell_saved(args, state, trainer.control)
            vars(trainer.control).update(vars(changed))

    def _find_best(self, newest: Path) -> None:
        """Set the path of the best checkpoint, which is that of another spelling or another place.

        A run may be resumed by an absolute path in place of a relative one, or after a move.

        Args:
            newest: A checkpoint of the run, which need not be there yet.
        """
        state = self._trainer.state
        if state.best_global_step:
            best = newest.with_name(f"checkpoint-{state.best_global_step}")
            if best == newest or best.is_dir():
                state.best_model_checkpoint = str(best)

    def _remove_old(self, run_folder: Path, kept: Path, best: str | None) -> None:
        """Remove the checkpoints that the Trainer's own function would remove, except two.

        A folder such as ``checkpoint-backup`` is a user's copy, and a checkpoint that a stock
        Trainer has written belongs to that training: they are neither counted nor removed.

        The Trainer's function deletes folders file by file, so a crash could leave half a
        checkpoint. Here its rule is followed: the newest and the best checkpoint are kept, and the
        oldest others are removed until the limit is met. In addition, a monitor may keep some: a
        training that has diverged has to go back to one from before.
        """
        limit = self._trainer.args.save_total_limit
        if limit is None or limit <= 0:
            return
        protected = {str(run_folder / kept.name)}
        if best is not None:
            protected.add(best)
        folders = own_checkpoints(run_folder)
        num_removed = max(len(folders) - max(limit, len(protected)), 0)
        others = [folder for folder in folders if str(folder) not in protected]
        callbacks = monitors(self._trainer.callback_handler.callbacks)
        wanted = {folder for one in callbacks for folder in one.checkpoints_to_keep(folders)}
        removed = [folder for folder in others[:num_removed] if folder not in wanted]
        remove_checkpoints(removed, run_folder)

    def output_folder(self, own: str) -> str:
        """Return the folder in which the Trainer writes or looks for checkpoints.

        While a checkpoint is written, it is the staging folder. At the end of a training, the
        Trainer would remove checkpoints itself, so it gets a folder that does not exist.

        Args:
            own: Folder that the Trainer would take.
        """
        if self._staging is not None:
            return str(self._staging)
        return str(Path(own, "_no_checkpoints")) if self.hides_checkpoints else own

    def hide(self) -> None:
        """Hide the checkpoints if the Trainer would remove some next, after its last log."""
        args, best = self._trainer.args, self._trainer.state.best_model_checkpoint
        removes = args.save_total_limit == 1 and args.should_save and best is not None
        self.hides_checkpoints = removes

    def end(self) -> None:
        """Do what the Trainer does between its last log and ``on_train_end``; see `finishing`.

        Call it before ``on_train_end``: what callbacks write there is theirs.
        """
        ending, self.ending, self.hides_checkpoints = self.ending, None, False
        if ending is not None:
            ending()

    def users_arguments(self) -> contextlib.AbstractContextManager[None]:
        """Within the block, the training's arguments are the user's, also while `writing`."""
        if self._staging is None:
            return contextlib.nullcontext()
        return replaced(self._trainer.args, push_to_hub=self._pushes)

    @contextlib.contextmanager
    def keeping_weight_names(self) -> Iterator[None]:
        """Within the block, make ``save_pretrained`` keep the network's own weight names.

        A model that is not of transformers gets copies of its tied weights, which safetensors
        refuses.

        The Trainer loads a checkpoint without converting names, so a checkpoint must hold the
        network's own names. With ``save_on_each_node``, the block also makes ``save_pretrained``
        write on one process of each node. By default, ``save_pretrained`` writes on global rank 0
        only. Outside of `writing`, the block changes nothing.

        Within the block, the trainer has a view of the model; the model itself stays as it is.
        """
        model: Any = self._trainer.model
        if not isinstance(model, PreTrainedModel) and not hasattr(model, "peft_config"):
            with replaced(self._trainer, model=lookalike(model, state_dict=_state_apart)):
                yield
            return
        if self._staging is None or not isinstance(model, PreTrainedModel):
            yield
            return
        save: Any = type(model).save_pretrained
        if takes(save, "save_original_format"):
            save = functools.partialmethod(save, save_original_format=False)
        members = {"save_pretrained": save}
        if self._trainer.args.save_on_each_node:
            members["should_save_on_this_rank"] = staticmethod(bool)
        with replaced(self._trainer, model=lookalike(model, **members)):
            yield

    @contextlib.contextmanager
    def _loading_best(self) -> Iterator[None]:
        """Verify the best checkpoint, whose weights the Trainer loads within the block."""
        trainer = self._trainer
        self._best_files = {}
        best = trainer.state.best_model_checkpoint
        with raising_together():
            is_reader = trainer.args.local_process_index == 0
            # Nodes with disks of their own may lack the manifest; the Trainer then warns.
            if is_reader and best is not None and (Path(best) / MANIFEST).is_file():
                try:
                    self._best_files = verify(Path(best)).identities
                except ValueError as error:
                    newest = newest_whole_checkpoint(Path(best).parent)
                    msg = (
                        f"cannot load the best model from {best}: {error}; newest intact "
                        f"checkpoint: {newest or 'none'}"
                    )
                    raise ValueError(msg) from error
        yield
        if best is not None and is_in_original_format(Path(best), trainer.model):
            load_original_format(Path(best), trainer.model)
        with raising_together():
            try:
                check_unchanged(Path(best or ""), self._best_files)
            except DamagedFileError as error:
                msg = f"cannot load the best model from {best}: {error}"
                raise ValueError(msg) from error

    @contextlib.contextmanager
    def finishing(self, run_folder: Path, *, keeps_last: bool) -> Iterator[None]:
        """Let the Trainer end a training; keep only the best checkpoint if the limit is one.

        With ``save_total_limit=1``, all checkpoints except the best are removed, provided that the
        Trainer has recorded which checkpoint is the best. The Trainer itself would delete them file
        by file, so a crash could leave half a checkpoint.

        Args:
            run_folder: Folder of the run's checkpoints.
            keeps_last: Whether to remove nothing, so that an interrupted training can be resumed.
        """
        with contextlib.ExitStack() as stack:
            if self._trainer.args.load_best_model_at_end:
                stack.enter_context(self._loading_best())
            self.ending = functools.partial(self._end, stack, run_folder, keeps_last=keeps_last)
            try:
                yield
                self.end()
            finally:
                self.ending, self.hides_checkpoints = None, False

    def _end(self, loading: contextlib.ExitStack, run_folder: Path, *, keeps_last: bool) -> None:
        loading.close()
        args, best = self._trainer.args, self._trainer.state.best_model_checkpoint
        if best is None or args.save_total_limit != 1 or not args.should_save or keeps_last:
            return
        others = [each for each in own_checkpoints(run_folder) if not each.samefile(best)]
        remove_checkpoints(others, run_folder)


def _refuse_changed(verified: tuple[Path, Mapping[str, Identity]] | None) -> None:
    """Raise ``ValueError`` if a file of a verified checkpoint has been deleted or changed."""
    if verified is not None:
        checkpoint, identities = verified
        try:
            check_unchanged(checkpoint, identities)
        except DamagedFileError as error:
            msg = f"cannot resume from {checkpoint}: {error}; start the training again"
            raise ValueError(msg) from error


def _check_own(trainer: TrainerView, folder: Path, *, has_monitors: bool, is_new: bool) -> None:
    """Check that a training replaces nobody's files.

    Args:
        trainer: The trainer.
        folder: Folder of the checkpoints. In a hyperparameter search each trial has one of its own,
            but the records of all trials go to ``args.output_dir``.
        has_monitors: Whether the training writes records.
        is_new: Whether the training starts from the beginning.

    Raises:
        FileExistsError: If it would.
    """
    rolls_back = trainer.rollbacks.are_on
    names = [FACTS, PROGRESS] if has_monitors else []
    names += [ROLLBACKS_FILE, SKIP_ROWS_FILE] if rolls_back else []
    run_folder = run_folder_of(trainer)
    check_own(run_folder / name for name in names)
    if is_new:
        _refuse_others_checkpoints(folder, after=-1)
    if rolls_back:
        begin_folder(run_folder)


def _refuse_others_checkpoints(run_folder: Path, *, after: int) -> None:
    """Refuse checkpoints of later steps that mfwrap has not written: the training would move them.

    Raises:
        FileExistsError: If there are any, of whatever kind: folders, files or links.
    """
    found = [path for path in run_folder.glob("checkpoint-*") if CHECKPOINT.fullmatch(path.name)]
    later = [path for path in found if step_of_checkpoint(path) > after]
    refuse_others([path for path in later if not is_own_checkpoint(path)])


def check_parameter_groups(folder: Path, optimizer: Optimizer) -> None:
    """Check that the parameter groups of an optimizer have the same sizes as in a checkpoint.

    Does nothing if the checkpoint has no ``optimizer.pt``.

    Raises:
        ValueError: If the sizes differ.
    """
    path = folder / "optimizer.pt"
    if not path.is_file():
        return
    # Only the list of groups is needed. `mmap` avoids reading the tensors.
    saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    expected = [len(group["params"]) for group in saved.get("param_groups", [])]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != expected:
        msg = (
            f"cannot resume from {path}: the saved parameter groups hold {expected} parameters, "
            f"but the optimizer's groups hold {sizes}"
        )
        raise ValueError(msg)


def _foreign_weights(trainer: TrainerView, folder: Path) -> str | None:
    """Return why the weights of a checkpoint do not belong to the trainer's model."""
    is_partial = saves_weights_itself(trainer)
    reason = foreign_weights(folder, trainer.model, may_be_partial=is_partial)
    if reason and not trains_shards(trainer) and is_in_original_format(folder, trainer.model):
        return None
    return reason


def _state_apart(view: Any, *args: Any, **keywords: Any) -> dict[str, Any]:
    """Return the state of the model that a view of it shows, without shared memory."""
    state: dict[str, Any] = super(type(view), view).state_dict(*args, **keywords)
    tensors = {name: one for name, one in state.items() if isinstance(one, torch.Tensor)}
    return {**state, **apart(tensors)}
