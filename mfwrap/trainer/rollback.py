"""Go back to a checkpoint after a bad step, and around the data of that step: ``rollback``."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from transformers.trainer_callback import TrainerControl

from mfwrap.arguments import check_choice, check_int, check_positive_number, described
from mfwrap.checkpoints.required_files import TRAINER_STATE
from mfwrap.checkpoints.resumption import AUTO
from mfwrap.checkpoints.run_folders import checkpoints_of_run, step_of_checkpoint
from mfwrap.checkpoints.verification import newest_whole_checkpoint
from mfwrap.checkpoints.whole import whole_file
from mfwrap.collectives import gather_objects, num_ranks, raising_together, this_rank
from mfwrap.records.own_names import is_own
from mfwrap.records.rollbacks import (
    ROLLBACKS_FILE,
    RollbackRecord,
    read_rollbacks,
    rollbacks_text,
)
from mfwrap.tensors.wrappers import unwrapped_optimizer
from mfwrap.trainer.data.skip import DataSkip
from mfwrap.trainer.events import BadSteps, finish_pending, monitors
from mfwrap.trainer.view import TrainerView, run_folder_of

_LOG = logging.getLogger(__name__)

SKIP_ROWS_FILE = "skip_rows.jsonl"
"""File in the run folder with all rows that the run has left out."""


@final
@dataclass(frozen=True, kw_only=True)
class Rollback:
    """After a bad step, go back to the newest checkpoint before it, and leave its data out.

    The result is bitwise that of a training from the start without these rows, unless
    `rate_factor` is less than 1, or the training process itself changes rows by random numbers.

    All ranks find non-finite gradients and anomalies of the global norm together. What one rank
    alone has found reaches the others before the next checkpoint. If only a sample of the training
    state shows a fault, the training goes back to before the last sample without it, and leaves out
    all steps since.

    Raises:
        TypeError: If a value has the wrong type.
        ValueError: If a value is out of range.
    """

    kinds: tuple[str, ...] = ("spike", "loss_spike")
    """Kinds of anomalies to go back after, as in ``anomalies.jsonl``: ``"spike"``,
    ``"loss_spike"``, ``"loss_drop"``, ``"loss_shift"``, ``"norm_shift"``,
    ``"local_norm_spike"``, ``"local_norm_drop"``, ``"update_spike"``, ``"state_spike"``,
    ``"learning_rate_spike"``, ``"zero_gradient"``, ``"vanishing_gradient"``,
    ``"gradient_not_finite"``, ``"loss_not_finite"``, ``"attention_logits"``, ``"expert_load"``,
    ``"update_growth"``, or a kind of a callback of your own. A list is accepted, too."""

    max_rollbacks: int = 3
    """Largest number of rollbacks of a run, also if it is started again. After that, training goes
    on without any."""

    leave_out: Literal["update", "rows"] = "update"
    """What to leave out: all rows of the bad steps, or only the rows that `TrainingStateMonitor`
    names with ``replay``. If it names none, all rows of the bad steps are left out."""

    updates_before: int = 0
    """Number of updates before the bad steps whose data are left out, too."""

    updates_after: int = 0
    """Number of updates after the bad steps whose data are left out, too."""

    rate_factor: float = 1.0
    """Factor of the learning rates of all groups for a while after the checkpoint, above 0 and at
    most 1. The schedule keeps its own rates. Rollbacks in a row do not multiply their factors: the
    smallest one holds."""

    slow_updates: int = 0
    """Number of updates after the checkpoint whose rates are multiplied by `rate_factor`. Skipped
    updates count, too."""

    def __post_init__(self) -> None:
        """Check the values."""
        kinds = self.kinds
        if not isinstance(kinds, (tuple, list)) or not all(isinstance(one, str) for one in kinds):
            msg = f"`kinds` must be names of kinds of anomalies, got {described(kinds)}"
            raise TypeError(msg)
        if not kinds:
            msg = "`kinds` must name at least one kind of anomalies, got none"
            raise ValueError(msg)
        object.__setattr__(self, "kinds", tuple(kinds))
        check_choice("leave_out", self.leave_out, ("update", "rows"))
        check_int("max_rollbacks", self.max_rollbacks)
        check_int("updates_before", self.updates_before, minimum=0)
        check_int("updates_after", self.updates_after, minimum=0)
        check_int("slow_updates", self.slow_updates, minimum=0)
        check_positive_number("rate_factor", self.rate_factor)
        if self.rate_factor > 1:
            msg = f"`rate_factor` must be a number > 0 and <= 1, got {self.rate_factor}"
            raise ValueError(msg)
        if (self.rate_factor < 1) != (self.slow_updates > 0):
            msg = (
                f"`slow_updates` must be >= 1 exactly if `rate_factor` is less than 1, got "
                f"slow_updates={self.slow_updates} and rate_factor={self.rate_factor}"
            )
            raise ValueError(msg)


@final
class Rollbacks:
    """Decide when an `MFTrainer` goes back, and to which checkpoint.

    All ranks know of the same non-finite gradients and spikes, and stop after the same step. What
    one rank knows alone, such as a non-finite loss, is told to the others before the next
    checkpoint and at the end of the training, so that no step has another message.

    A rollback is written to ``rollbacks.json`` before anything else is done. If the process is
    killed, ``resume_from_checkpoint="auto"`` continues with it.

    Args:
        trainer: The trainer.
        settings: Settings; ``None`` never goes back.
        skip: Data to skip.
        wait_for_checkpoint: Waits until a checkpoint that is being written is in place; called on
            all ranks.

    Raises:
        TypeError: If `settings` is neither a `Rollback` nor ``None``.
    """

    def __init__(
        self,
        trainer: TrainerView,
        settings: Rollback | None,
        skip: DataSkip,
        wait_for_checkpoint: Callable[[], None] = lambda: None,
    ) -> None:
        if settings is not None and not isinstance(settings, Rollback):
            msg = f"`rollback` must be a mfwrap.trainer.Rollback or None, got {described(settings)}"
            raise TypeError(msg)
        self._trainer = trainer
        self._settings = Rollback() if settings is None else settings
        self._skip = skip
        self._wait_for_checkpoint = wait_for_checkpoint
        self._done: list[RollbackRecord] = []
        self._pending: str | None = None
        self._own: list[BadSteps] = []  # that other ranks do not know of yet
        self._request: BadSteps | None = None
        self.target: str | None = None
        """Checkpoint to go back to, when the training has ended; ``None`` if it is complete."""
        self.is_stopping = False
        """Whether the training is about to end, to go back."""
        self.has_gone_back = False
        """Whether the training goes on after a rollback of the same call of ``train``."""
        self.may_slow = False
        """Whether a rollback that was done lowers the learning rates of some updates."""
        self.are_on = settings is not None
        """Whether the training may go back, and write a list of rollbacks and of rows."""

    @property
    def _run_folder(self) -> Path:
        return run_folder_of(self._trainer)

    def begin(self, asked_for: Any) -> Any:
        """Read the rollbacks of the run, and return the checkpoint to resume from.

        Call it on all ranks before each training. The file of an earlier run is deleted; one that
        mfwrap has not written stays.

        Args:
            asked_for: Checkpoint that the user asks for, as in ``resume_from_checkpoint``.

        Returns:
            The checkpoint of a rollback that was begun and not completed, if the newest one is
            asked for; else `asked_for`.

        Raises:
            ValueError: If the file is damaged.
        """
        path = self._run_folder / ROLLBACKS_FILE
        self.has_gone_back = self.target is not None
        self.is_stopping, self._request, self._own, self.target = False, None, [], None
        self._done, self._pending = [], None
        for callback in monitors(self._trainer.callback_handler.callbacks):
            callback.bad_steps()  # found while the last training ended: it is undone
        content = None
        with raising_together():
            if this_rank() == 0 and path.exists() and is_own(path):
                if asked_for:
                    content = read_rollbacks(self._run_folder)
                else:
                    path.unlink()
        content = gather_objects(content)[0] if asked_for else None
        if content is not None:
            self._done, self._pending = content
        self._skip.rows.add(frozenset(row for done in self._done for row in done.rows))
        self.may_slow = any(done.rate_factor < 1 for done in self._done)
        if self._pending is not None and (asked_for is True or asked_for == AUTO):
            return str(self._run_folder / self._pending)
        return asked_for

    def begun(self) -> None:
        """Note that the training has resumed from the checkpoint of the last rollback.

        Call it when checkpoints of later steps have other names.

        Raises:
            ValueError: If no monitor reports anomalies of a chosen kind, or if the rates are to be
                lowered and a group of the optimizer has none.
        """
        if self._pending is not None:
            self._pending = None
            self._write()
        if not self.are_on:
            return
        optimizer = self._trainer.optimizer
        computes = any(
            g.get("lr") is None or g.get("relative_step") for g in optimizer.param_groups
        )
        if self._settings.slow_updates and computes:
            msg = (
                "`rate_factor` of `rollback` needs an optimizer that takes its learning rates from "
                f"its groups, got {type(unwrapped_optimizer(optimizer)).__name__}, which computes "
                "its own"
            )
            raise ValueError(msg)
        callbacks = monitors(self._trainer.callback_handler.callbacks)
        known = sorted({kind for callback in callbacks for kind in callback.bad_kinds})
        for kind in self._settings.kinds:
            if kind not in known:
                msg = (
                    f"`rollback` needs a callback that reports anomalies of kind {kind!r}, such as "
                    f"TrainingStateMonitor; the callbacks report {', '.join(known) or 'none'}"
                )
                raise ValueError(msg)

    def rate_factor(self, step: int) -> float:
        """Return the factor of the learning rates of a step.

        It depends only on the step and the rollbacks that are on disk, so a training that resumes
        gets the same factors.
        """
        return min((done.rate_factor for done in self._done if done.slows(step)), default=1.0)

    def after_event(self, event: str, control: TrainerControl) -> None:
        """Look at what the monitors have found, and stop the training if it must go back.

        Call it on all ranks if `are_on`. Before a checkpoint is written, all ranks exchange what
        they have found. The training stops on all ranks or on none.

        Args:
            event: Name of the event that the callbacks have handled.
            control: The trainer's control after that, which is changed.
        """
        if event in {"on_step_end", "on_epoch_end"} and not self.is_stopping:
            if control.should_save:
                finish_pending(self._trainer)
            self._look(exchanges=control.should_save or num_ranks() == 1)
        if self.is_stopping:
            control.should_training_stop = True
            control.should_save = control.should_evaluate = False

    def _look(self, *, exchanges: bool) -> None:
        callbacks = monitors(self._trainer.callback_handler.callbacks)
        found = [bad for callback in callbacks for bad in callback.bad_steps()]
        found = [bad for bad in found if bad.kind in self._settings.kinds]
        known_to_all = [bad for bad in found if bad.is_shared]
        self._own += [bad for bad in found if not bad.is_shared]
        if exchanges:
            own, self._own = self._own, []
            known_to_all += [bad for of_rank in gather_objects(own) for bad in of_rank]
        if known_to_all:
            first = min(known_to_all, key=lambda bad: bad.first_step)
            self._request = first if self._may_go_back(first) else None
            self.is_stopping = self._request is not None

    def _limit(self, bad: BadSteps) -> int:
        """Return the first step whose checkpoint is too late."""
        return bad.first_step - self._settings.updates_before

    def _may_go_back(self, bad: BadSteps) -> bool:
        """Return whether a rollback is possible; if not, log why. Call it on all ranks."""
        self._wait_for_checkpoint()
        settings, limit = self._settings, self._limit(bad)
        own = [step_of_checkpoint(path) for path in checkpoints_of_run(self._run_folder)]
        steps = gather_objects(own)[0]  # the disk of rank 0
        if len(self._done) >= settings.max_rollbacks:
            reason = f"{settings.max_rollbacks} rollbacks have been done"
        elif not any(step < limit for step in steps):
            reason = f"there is no checkpoint before step {limit}; set `save_steps` lower"
        else:
            return True
        if this_rank() == 0:
            _LOG.warning("step %d: no rollback after %s: %s", bad.first_step, bad.kind, reason)
        return False

    def decide(self) -> None:
        """Decide on the `target`; call it on all ranks when the training has ended.

        The decision is on disk before it returns.

        Raises:
            RuntimeError: If no checkpoint before the bad steps is intact any more.
        """
        settings = self._settings
        if not self.are_on:
            return
        if not self.is_stopping:
            self._look(exchanges=True)
        bad, self._request, self.is_stopping = self._request, None, False
        if bad is None:
            return
        name = None
        with raising_together():
            if this_rank() == 0:
                name = self._newest_name(bad)
        name = gather_objects(name)[0] or ""
        rows = self._skip.rows_of_steps(
            (bad.first_step, bad.last_step),
            (settings.updates_before, settings.updates_after),
            bad.rows if settings.leave_out == "rows" else (),
        )
        self._done.append(
            RollbackRecord(
                kind=bad.kind,
                first_step=bad.first_step,
                last_step=bad.last_step,
                checkpoint=name,
                rows=tuple(sorted(rows)),
                description=bad.description,
                rate_factor=float(settings.rate_factor),
                slow_updates=settings.slow_updates,
            )
        )
        self._pending = name
        self._write()
        if this_rank() == 0:
            _LOG.warning(
                "step %d: %s; going back to %s and leaving out %d rows of the data (rollback %d of "
                "%d); see %s",
                bad.first_step,
                bad.kind,
                name,
                len(rows),
                len(self._done),
                settings.max_rollbacks,
                self._run_folder / ROLLBACKS_FILE,
            )
        self.target = str(self._run_folder / name)

    def _newest_name(self, bad: BadSteps) -> str:
        limit = self._limit(bad)
        before = self._run_folder / f"checkpoint-{limit}"
        found = newest_whole_checkpoint(self._run_folder, before, required=[TRAINER_STATE])
        if found is None:
            msg = (
                f"cannot go back after {bad.kind} at step {bad.first_step}: no checkpoint before "
                f"step {limit} in {self._run_folder} is intact any more"
            )
            raise RuntimeError(msg)
        return found.name

    def _write(self) -> None:
        """Write all rollbacks, and the list of rows for a run that leaves them out from its start.

        Rank 0 writes; all ranks wait for it.
        """
        with raising_together():
            if this_rank() != 0:
                return
            rows = sorted(
                {*self._skip.rows.present, *(row for done in self._done for row in done.rows)}
            )
            with whole_file(self._run_folder / SKIP_ROWS_FILE) as partial:
                lines = (f'{{"epoch": {epoch}, "position": {place}}}\n' for epoch, place in rows)
                partial.write_text("".join(lines), encoding="utf-8")
            with whole_file(self._run_folder / ROLLBACKS_FILE) as partial:
                partial.write_text(rollbacks_text(self._done, self._pending), encoding="utf-8")
