"""Save checkpoints of an `MFTrainer` in the background: ``async_save``."""

import contextlib
import copy
import itertools
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import final

from transformers import TrainerState
from transformers.training_args import ParallelMode

from mfwrap.checkpoints.background import BackgroundWriter
from mfwrap.checkpoints.host_copies import HostCopies
from mfwrap.collectives import num_ranks, raising_together, this_rank
from mfwrap.collectives.store import new_connection
from mfwrap.compatibility.torch import default_store
from mfwrap.compatibility.transformers import (
    completes_checkpoints_itself,
    saves_optimizer_itself,
    saves_weights_itself,
)
from mfwrap.tensors.shards import is_distributed
from mfwrap.termination import LastStep
from mfwrap.trainer.deferred_files import DeferredFiles
from mfwrap.trainer.events import monitors
from mfwrap.trainer.view import TrainerView, trains_shards

_LOG = logging.getLogger(__name__)

_SECONDS_BETWEEN_CHECKS = 0.05
"""Time between two looks of a rank whether the checkpoint is written, until it is."""

_WHOLE = frozenset(
    {ParallelMode.NOT_PARALLEL, ParallelMode.NOT_DISTRIBUTED, ParallelMode.DISTRIBUTED}
)
"""Ways of training in which rank 0 has the whole state."""

_saves = itertools.count()


@dataclass
class _Pending:
    """A checkpoint that is being written."""

    state: TrainerState
    """State of the training at the step of the checkpoint."""

    complete: Callable[[TrainerState], None]
    owned: contextlib.ExitStack
    """Owns the run folder."""

    agreed: LastStep | None
    """Step at which all ranks learn that the checkpoint is written; ``None`` with one rank."""

    writes: bool
    """Whether this rank writes."""


@final
class BackgroundSaves:
    """Write the large files of checkpoints in a thread, one checkpoint after the other.

    A rank that saves writes from a thread, which starts no collective. All ranks learn at the same
    step that the checkpoint is written, or that it could not be: then all raise the error, and
    there is no checkpoint.

    Args:
        trainer: The trainer.
        is_wanted: Whether the trainer was asked to save in the background. A callback may ask, too.
    """

    def __init__(self, trainer: TrainerView, *, is_wanted: bool) -> None:
        self._trainer = trainer
        self._is_wanted = is_wanted
        self._copies, self._writer = HostCopies(), BackgroundWriter()
        self._pending: _Pending | None = None
        self._is_training = False
        self._said: str | None = None

    @property
    def are_wanted(self) -> bool:
        """Whether the trainer or a callback of it asks for them."""
        callbacks = monitors(self._trainer.callback_handler.callbacks)
        return self._is_wanted or any(each.saves_in_background for each in callbacks)

    @property
    def is_pending(self) -> bool:
        """Whether a checkpoint is being written, as far as all ranks know."""
        return self._pending is not None

    @contextlib.contextmanager
    def of_training(self) -> Iterator[None]:
        """Train within the block. An error that leaves it waits for the writer of this rank."""
        try:
            yield
        finally:
            self._is_training = False
            pending, self._pending = self._pending, None
            if pending is not None:
                # No collective: the other ranks may not be here.
                with pending.owned:
                    try:
                        self._end(pending)
                    except Exception as error:  # noqa: BLE001  (the error of the training goes on)
                        step = pending.state.global_step
                        _LOG.error("checkpoint-%d could not be written: %s", step, error)

    def begin(self) -> None:
        """Note that the loop of the training begins; other checkpoints are written at once."""
        self._is_training = True

    def end(self) -> None:
        """Wait for the last checkpoint of the loop; call it on all ranks."""
        self.settle(waits=True)
        self._is_training = False

    def are_on(self) -> bool:
        """Return whether the next checkpoint is written in the background; same on all ranks."""
        if not (self._is_training and self.are_wanted):
            return False
        reason = _why_at_once(self._trainer)
        if reason is not None and reason != self._said:
            self._said = reason
            if this_rank() == 0:
                _LOG.warning("checkpoints are not written in the background: %s", reason)
        return reason is None

    @contextlib.contextmanager
    def copied(self) -> Iterator[DeferredFiles]:
        """Copy the state for a checkpoint, which the block passes on to `submit`."""
        try:
            yield DeferredFiles(self._trainer, self._copies)
        finally:
            if self._pending is None:
                self._copies.release()

    def submit(
        self,
        write: Callable[[], None] | None,
        complete: Callable[[TrainerState], None],
        owned: contextlib.ExitStack,
    ) -> None:
        """Begin to write a checkpoint; call it on all ranks, after `settle`.

        Args:
            write: What the thread does; ``None`` on a rank that does not save.
            complete: Called by `settle` on all ranks at the same step, when the checkpoint is
                written, with the state of its step.
            owned: Owns the run folder until then.
        """
        state = copy.copy(self._trainer.state)
        state.log_history = list(state.log_history)
        agreed = None
        if num_ranks() > 1:
            connection = new_connection(default_store(), "mfwrap/saves")
            if connection is not None:  # in a fake process group, no other rank answers
                agreed = LastStep(
                    connection,
                    f"{next(_saves)}/",
                    this_rank(),
                    num_ranks(),
                    reason="a checkpoint was written in the background",
                    seconds_between_checks=_SECONDS_BETWEEN_CHECKS,
                )
        self._pending = _Pending(state, complete, owned, agreed, write is not None)
        if write is not None:
            self._writer.submit(write)

    def settle(self, *, waits: bool = False) -> None:
        """Complete the checkpoint if it is written; call it on all ranks, once before each step.

        Args:
            waits: Whether to wait until it is.

        Raises:
            Exception: On all ranks, if the checkpoint could not be written.
        """
        pending = self._pending
        if pending is None or not (waits or self._is_written(pending)):
            return
        self._pending = None
        with pending.owned:
            with raising_together():
                self._end(pending)
            pending.complete(pending.state)

    def _is_written(self, pending: _Pending) -> bool:
        is_done = pending.writes and not self._writer.is_running
        if pending.agreed is None:
            return is_done
        step: int = self._trainer.state.global_step
        return pending.agreed.is_reached(step, is_requested=is_done)

    def _end(self, pending: _Pending) -> None:
        """Wait for this rank's thread, and raise its error."""
        if pending.agreed is not None:
            pending.agreed.close()
        try:
            self._writer.wait()
        finally:
            self._copies.release()


def _why_at_once(trainer: TrainerView) -> str | None:
    """Return why checkpoints cannot be written in the background; ``None`` if they can."""
    name = type(trainer).__name__
    if trains_shards(trainer) or trainer.args.parallel_mode not in _WHOLE:
        return "no rank has the whole state"
    if any(is_distributed(parameter) for parameter in trainer.model.parameters()):
        return "the weights are distributed over ranks"
    if completes_checkpoints_itself(trainer):
        return f"{name} has a `_save_checkpoint` of its own, which may read what is written"
    if saves_weights_itself(trainer):
        return f"the weights are saved by a method of {name}'s or the model's own"
    if saves_optimizer_itself(trainer):
        return f"{name} saves or loads its optimizer by a method of its own"
    return None
