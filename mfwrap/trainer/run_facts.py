"""Say in the run folder what a Trainer's run was, beside the records of its monitors."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from transformers import TrainerState

from mfwrap.compatibility.transformers import has_own
from mfwrap.records.run_facts import RunFacts, lasting_facts
from mfwrap.records.run_files import record_folders
from mfwrap.trainer.view import TrainerView


@final
class TrainerFacts:
    """Write `RunFacts` in the folder in which a monitor of a trainer writes records.

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer
        self._facts: RunFacts | None = None
        self.after_event: dict[str, Callable[[TrainerState], None]] = {"on_train_begin": self.begin}
        """What to call with the trainer's state after the callbacks, by the name of the event."""

        self.configuration: Mapping[str, Any] | None = None
        """Settings of the run; ``None`` for those of the trainer and its step."""

    def begin(self, state: TrainerState) -> None:
        """Begin to write at the start of a training, in the main process, if a monitor does."""
        self.after_event = {"on_train_begin": self.begin}
        folders = record_folders()
        if folders and state.is_world_process_zero:
            self._facts = self._of_trainer(folders, state)
            self.after_event |= {
                "on_log": self._note,
                "on_save": self._save,
                "on_train_end": self._end,
            }

    def lasting(self) -> dict[str, Any]:
        """Return the facts of the run that stay the same when it is resumed; see `RunFacts`."""
        return lasting_facts(self._configuration(), self._trainer.model)

    def _note(self, state: TrainerState) -> None:
        if self._facts is not None:
            self._facts.note(state.global_step, self._tokens(state))

    def _save(self, _: TrainerState) -> None:
        if self._facts is not None:
            self._facts.save()

    def _end(self, state: TrainerState) -> None:
        if self._facts is not None:
            handler: Any = self._trainer.callback_handler
            is_stopped = handler.termination.is_stopping
            how = "stopped by a signal" if is_stopped else "stopped early"
            self._facts.end(state.global_step, how)
        self._facts = None

    def _of_trainer(self, folders: Sequence[Path], state: TrainerState) -> RunFacts:
        trainer: Any = self._trainer
        args = trainer.args
        run_folder = Path(args.output_dir).absolute()
        return RunFacts(
            run_folder if run_folder in folders else folders[0],
            self._configuration(),
            trainer.model,
            first_step=state.global_step,
            max_steps=state.max_steps,
        )

    def _configuration(self) -> Mapping[str, Any]:
        trainer: Any = self._trainer
        if self.configuration is not None:
            return self.configuration
        step = dataclasses.asdict(trainer.attached.config)
        return {"training": trainer.args.to_dict(), "step": step}

    def _tokens(self, state: TrainerState) -> int | None:
        """Return the tokens of the run so far; the Trainer has counted their operations."""
        trainer: Any = self._trainer
        if getattr(trainer.model, "main_input_name", None) != "input_ids":
            return None
        # A formula of the user's own may need more than the number of tokens.
        if has_own(trainer, "floating_point_ops"):
            return None
        # A training that resumes after its last update has counted nothing yet.
        operations = trainer.floating_point_ops({"input_ids": torch.zeros(1)})
        return round(state.total_flos / operations) if operations else None
