"""How a Trainer's checkpoint is written, and where in its data and log a run stands."""

import json
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any, Self, final

from transformers.trainer_utils import rotate_checkpoints

from mfwrap.checkpoints import move_into_place, staging_folder, write_manifest
from mfwrap.random_states import random_states, restore_random_states

__all__ = ["StagedCheckpoint", "TrainerPosition"]

_POSITION = "mfwrap_position.json"


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
        if trainer.args.should_save:
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
            rotate_checkpoints(
                output_dir=str(self._final.parent),
                save_total_limit=trainer.args.save_total_limit,
                best_model_checkpoint=trainer.state.best_model_checkpoint,
                use_mtime=True,
            )
        trainer.accelerator.wait_for_everyone()
        if trainer.args.push_to_hub:
            trainer._push_from_checkpoint(str(self._final))


@final
class TrainerPosition:
    """Where in its data and its log a run stands, beyond what the Trainer itself saves.

    Args:
        epoch_random_states: Of all generators at the begin of the epoch, which its order and the
            seeds of its workers come from.
        saved: What a checkpoint holds; ``None`` for a run that was not resumed.
    """

    def __init__(
        self, epoch_random_states: dict[str, Any], saved: dict[str, Any] | None = None
    ) -> None:
        self._epoch_random_states = epoch_random_states
        self._saved = saved

    @classmethod
    def now(cls) -> "TrainerPosition":
        """Return the position at the begin of an epoch."""
        return cls(random_states())

    def restore_epoch(self) -> None:
        """Set the random generators to what they were at the begin of the epoch."""
        restore_random_states(self._epoch_random_states)

    @classmethod
    def load(cls, folder: Path) -> "TrainerPosition | None":
        """Return the position of a checkpoint; ``None`` if it was written by a stock Trainer."""
        path = folder / _POSITION
        if not path.exists():
            return None
        saved = json.loads(path.read_text(encoding="utf-8"))
        return cls(saved["epoch_random_states"], saved)

    def save(self, folder: Path, trainer: Any) -> None:
        """Write the position; waits for the device."""
        content = {
            "epoch_random_states": self._epoch_random_states,
            "loss_since_last_log": trainer._tr_loss.item(),
            "last_logged": trainer._globalstep_last_logged,
            "step_log": trainer.step_log.state_dict(),
        }
        (folder / _POSITION).write_text(json.dumps(content) + "\n", encoding="utf-8")

    def restore_log(self, trainer: Any) -> None:
        """Let the log go on in the middle of what it was counting."""
        if self._saved is None:
            return
        trainer._tr_loss.fill_(self._saved["loss_since_last_log"])
        trainer._globalstep_last_logged = self._saved["last_logged"]
        trainer.step_log.load_state_dict(self._saved["step_log"])
