"""Say in the run folder what a Trainer's run was, beside the records of its monitors."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import torch
from transformers import TrainerState

from mfwrap.compatibility.transformers import has_own
from mfwrap.records.run_facts import RunFacts, fail_resume, lasting_facts
from mfwrap.records.run_files import record_folders
from mfwrap.termination import RankTermination
from mfwrap.trainer.data.row_skip import RowSkip
from mfwrap.trainer.view import TrainerView, run_folder_of


@final
class TrainerFacts:
    """Write `RunFacts` in the folder in which a monitor of a trainer writes records.

    It is a listener of `mfwrap.trainer.events.add_step_to_events`.

    Args:
        trainer: The trainer.
        termination: Says at the end whether a signal has stopped the training.
        rows: Rows that the training leaves out.
    """

    def __init__(self, trainer: TrainerView, termination: RankTermination, rows: RowSkip) -> None:
        self._trainer = trainer
        self._termination = termination
        self._rows = rows
        self._facts: RunFacts | None = None
        self._ended: RunFacts | None = None
        self.has_failed = False
        """Whether a training that had begun has failed."""
        self._given: Mapping[str, Any] | None = None
        self._code: Mapping[str, Any] | None = None
        self.inputs: Mapping[str, Any] = {}
        """What the training gets from outside of its checkpoints; see `RunFacts`."""

    def describe(
        self,
        configuration: Mapping[str, Any],
        code: Mapping[str, Any] | None = None,
        inputs: Mapping[str, Any] | None = None,
    ) -> None:
        """Take other settings of the run than those of the trainer and its step.

        Args:
            configuration: The settings.
            code: The user's own modules that the run has imported; see `RunFacts`.
            inputs: What the training gets from outside of its checkpoints; see `RunFacts`.
        """
        self._given, self._code, self.inputs = configuration, code, inputs or {}

    def on_train_begin(self, _args: Any, state: TrainerState, _control: Any) -> None:
        """Begin to write in the main process, if a monitor writes."""
        folders = record_folders()
        writes = folders and state.is_world_process_zero
        self._facts = self._of_trainer(folders, state) if writes else None

    def lasting(self) -> dict[str, Any]:
        """Return the facts of the run that stay the same when it is resumed; see `RunFacts`."""
        return lasting_facts(self._configuration(), self._trainer.model)

    def on_log(self, _args: Any, state: TrainerState, _control: Any) -> None:
        """Note the step and its tokens; at an evaluation, the Trainer has not counted them yet."""
        if self._facts is not None and {"loss", "train_loss"} & state.log_history[-1].keys():
            self._facts.note(state.global_step, self._tokens(state))

    def on_save(self, *_: Any) -> None:
        """Write what was noted."""
        if self._facts is not None:
            self._facts.save()

    def on_train_end(self, _args: Any, state: TrainerState, _control: Any) -> None:
        """Write how the training has ended."""
        if self._facts is not None:
            how = "stopped by a signal" if self._termination.is_stopping else "stopped early"
            self._facts.end(state.global_step, how)
        self._ended, self._facts = self._facts, None

    @contextlib.contextmanager
    def of_training(self) -> Iterator[None]:
        """Train within the block; see `writing_failure`."""
        self._facts = self._ended = None
        with self.writing_failure():
            yield

    @contextlib.contextmanager
    def writing_failure(self) -> Iterator[None]:
        """Write that the training, or what follows it, has failed if the block raises an error."""
        try:
            yield
        except Exception as error:
            facts, self._facts = self._facts, None
            self.has_failed = facts is not None
            # On a full disk, or with a damaged file, the first error is the one to tell.
            with contextlib.suppress(OSError, ValueError):
                if facts is not None:
                    facts.fail(error, self._trainer.state.global_step)
                elif self._ended is not None:
                    self._ended.fail(error)
                elif self._given is not None and self._trainer.is_world_process_zero():
                    fail_resume(run_folder_of(self._trainer), error)
            raise

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
            code=self._code,
            inputs=self.inputs,
            is_resume=not trainer.rollbacks.has_gone_back,
        )

    def _configuration(self) -> Mapping[str, Any]:
        trainer: Any = self._trainer
        rows = {"skip_rows": self._rows.present_fact} if self._rows.present else {}
        if self._given is not None:
            return {**self._given, **rows}
        step = dataclasses.asdict(trainer.attached.config)
        for name in ("gradient_accumulation_steps", "use_clip_grad", "max_grad_norm"):
            del step[name]  # the Trainer's arguments decide
        average, args = trainer.attached.ema, trainer.args
        # transformers hides a token, also one that is not set.
        training = {
            name: None if getattr(args, name, value) is None else value
            for name, value in args.to_dict().items()
        }
        return {
            "training": training,
            "step": step,
            **({} if average is None else {"ema": dict(average.settings)}),
            **rows,
            **trainer.batch_growth.settings(),
        }

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
        if not operations:
            return None
        # TRL's Trainers that generate count tokens, and no operations.
        return round(state.total_flos / operations) or state.num_input_tokens_seen
