"""How a Trainer's checkpoint is written, and where in its data and log a run stands."""

import json
import os
import shutil
import warnings
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

import torch
from torch.optim import Optimizer
from transformers.trainer_utils import rotate_checkpoints

from mfwrap.arguments import callers_stacklevel
from mfwrap.checkpoints.folders import (
    adopt_files,
    move_into_place,
    remove_checkpoints,
    staging_folder,
)
from mfwrap.checkpoints.manifest import write_manifest
from mfwrap.checkpoints.random_states import random_states, restore_random_states
from mfwrap.checkpoints.step_files import has_step_files, read_step_parts
from mfwrap.trainer.data_position import DataPosition
from mfwrap.trainer.events import save_callbacks

__all__ = [
    "StagedCheckpoint",
    "TrainerPosition",
    "check_average",
    "check_parameter_groups",
    "remove_old_checkpoints",
]


def _file_name(rank: int, num_ranks: int) -> str:
    return f"mfwrap_position_{rank}.json" if num_ranks > 1 else "mfwrap_position.json"


@final
class StagedCheckpoint:
    """A checkpoint while it is written, beside those that are whole.

    Within the ``with`` block the Trainer neither pushes nor deletes anything.

    Args:
        trainer: Who writes.
        run_folder: Where its checkpoints lie.
    """

    def __init__(self, trainer: Any, run_folder: Path) -> None:
        self._trainer = trainer
        name = f"checkpoint-{trainer.state.global_step}"
        self.folder = staging_folder(run_folder)
        self._written = self.folder / name
        self._final = run_folder / name
        args = trainer.args
        self._settings = {
            "push_to_hub": args.push_to_hub,
            "save_total_limit": args.save_total_limit,
            "logging_nan_inf_filter": args.logging_nan_inf_filter,
        }

    def __enter__(self) -> Self:
        trainer = self._trainer
        if trainer.args.should_save or trainer.args.local_process_index == 0:
            shutil.rmtree(self.folder, ignore_errors=True)
        trainer.accelerator.wait_for_everyone()
        trainer.args.push_to_hub, trainer.args.save_total_limit = False, None
        # What is saved with the model are the settings that the user gave.
        trainer.args.logging_nan_inf_filter = trainer.step_log.filters
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for name, value in self._settings.items():
            setattr(self._trainer.args, name, value)

    def finish(self) -> None:
        """Move what was written into place; then delete what is too old, and push."""
        trainer = self._trainer
        callbacks = trainer.callback_handler.callbacks
        save_callbacks(callbacks, self._written, trainer.args, trainer.model)
        best_step = trainer.state.best_global_step
        if best_step:
            best = self._final.parent / f"checkpoint-{best_step}"
            if best == self._final or best.is_dir():
                trainer.state.best_model_checkpoint = str(best)
        trainer.accelerator.wait_for_everyone()
        if trainer.args.should_save:
            trainer.state.save_to_json(str(self._written / "trainer_state.json"))
            write_manifest(self._written)
            move_into_place(self._written, self._final)
            remove_old_checkpoints(trainer, self._final.parent)
        trainer.accelerator.wait_for_everyone()
        if trainer.args.local_process_index == 0 and not trainer.args.should_save:
            adopt_files(self._written, self._final)
        if trainer.args.push_to_hub:
            trainer._push_from_checkpoint(str(self._final))


def remove_old_checkpoints(trainer: Any, run_folder: Path) -> None:
    """Delete the checkpoints that the Trainer's own rule gives up; each goes at once.

    That rule deletes in place, file by file, so it is given empty folders to choose from.
    """
    if trainer.args.save_total_limit is None:
        return
    folders = [path for path in run_folder.glob("checkpoint-*") if path.is_dir()]
    choice = staging_folder(run_folder) / "choice"
    shutil.rmtree(choice, ignore_errors=True)
    for folder in folders:
        (choice / folder.name).mkdir(parents=True)
        times = folder.stat()
        os.utime(choice / folder.name, ns=(times.st_atime_ns, times.st_mtime_ns))
    best = trainer.state.best_model_checkpoint
    if best is not None and Path(best).parent == run_folder:
        best = str(choice / Path(best).name)
    rotate_checkpoints(
        output_dir=str(choice),
        save_total_limit=trainer.args.save_total_limit,
        best_model_checkpoint=best,
        use_mtime=True,
    )
    given_up = [folder for folder in folders if not (choice / folder.name).exists()]
    shutil.rmtree(choice, ignore_errors=True)
    remove_checkpoints(given_up, run_folder)


def check_average(folder: Path, *, is_given: bool) -> None:
    """Check that an average in a checkpoint has one to go on in.

    Raises:
        ValueError: If it has not.
    """
    if not is_given and has_step_files(folder) and "ema" in read_step_parts(folder):
        msg = f"`ema` must be given to go on from {folder}, which has an average, got none"
        raise ValueError(msg)


def check_parameter_groups(folder: Path, optimizer: Optimizer) -> None:
    """Check that an optimizer has its parameters in groups as a checkpoint's, if it holds one.

    Raises:
        ValueError: If it has not.
    """
    path = folder / "optimizer.pt"
    if not path.is_file():
        return
    # Of what is mapped, only the list of groups is read.
    saved = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    expected = [len(group["params"]) for group in saved.get("param_groups", [])]
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    if sizes != expected:
        msg = (
            f"the optimizer must have groups of {expected} parameters to go on from {path}, got "
            f"{sizes}"
        )
        raise ValueError(msg)


@final
class TrainerPosition:
    """Where in its data and its log a run stands, beyond what the Trainer itself saves.

    Args:
        epoch_random_states: Of all generators at the begin of the epoch, which its order and the
            seeds of its workers come from.
        saved: What a checkpoint holds; ``None`` for a run that was not resumed.
        is_own: Whether as many ranks wrote it as there are now.
    """

    def __init__(
        self,
        epoch_random_states: dict[str, Any],
        saved: dict[str, Any] | None = None,
        *,
        is_own: bool = True,
    ) -> None:
        self._epoch_random_states = epoch_random_states
        self._saved = saved
        self._is_own = is_own

    @classmethod
    def now(cls) -> "TrainerPosition":
        """Return the position at the begin of an epoch."""
        return cls(random_states())

    @property
    def data(self) -> dict[str, Any] | None:
        """What `DataPosition.state_dict` returned; ``None`` if it is not known of this rank."""
        return self._saved.get("data") if self._saved is not None and self._is_own else None

    def restore_epoch(self) -> None:
        """Set the random generators to what they were at the begin of the epoch."""
        restore_random_states(self._epoch_random_states)

    @classmethod
    def load(cls, folder: Path, rank: int, num_ranks: int) -> "TrainerPosition | None":
        """Return a rank's position in a checkpoint; ``None`` if a stock Trainer wrote it.

        If another number of ranks wrote it, that of rank 0 stands for those that are missing.
        """
        names = [_file_name(rank, num_ranks), _file_name(0, 1), _file_name(0, 2)]
        path = next((folder / name for name in names if (folder / name).exists()), None)
        if path is None:
            return None
        saved = json.loads(path.read_text(encoding="utf-8"))
        if saved.get("num_ranks", 1) != num_ranks and rank == 0:
            warnings.warn(
                f"{folder} was written by {saved['num_ranks']} ranks and goes on with {num_ranks}: "
                "which data come next, random numbers and the loss since the last log are not "
                "exactly those of the run that was stopped",
                stacklevel=callers_stacklevel(),
            )
        is_own = saved.get("num_ranks", 1) == num_ranks
        return cls(saved["epoch_random_states"], saved, is_own=is_own)

    def save(self, folder: Path, trainer: Any, data: DataPosition) -> None:
        """Write the position of this rank; waits for the device."""
        args = trainer.args
        content = {
            "num_ranks": args.world_size,
            "epoch_random_states": self._epoch_random_states,
            "loss_since_last_log": trainer._tr_loss.item(),
            "loss_until_last_log": trainer._total_loss_scalar,
            "last_logged": trainer._globalstep_last_logged,
            "step_log": trainer.step_log.state_dict(),
            "data": data.state_dict(),
        }
        # The rank that saves the model may still be about to make it.
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _file_name(args.process_index, args.world_size)
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")

    def restore_log(self, trainer: Any) -> None:
        """Let the log go on in the middle of what it was counting."""
        if self._saved is None:
            return
        trainer._tr_loss.fill_(self._saved["loss_since_last_log"])
        trainer._total_loss_scalar = self._saved["loss_until_last_log"]
        trainer._globalstep_last_logged = self._saved["last_logged"]
        trainer.step_log.load_state_dict(self._saved["step_log"])
