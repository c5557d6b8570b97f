"""Leave data of a Trainer out: those of the first updates, and listed rows.

The Trainer derives its position in the data from ``global_step``, the number of updates done. Here
the two differ by an offset, which is saved in each checkpoint: the number of updates whose data
have been left out.
"""

import contextlib
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, final

from mfwrap.arguments import check_int
from mfwrap.records.skipped_rows import SkippedRow, SkipRows
from mfwrap.trainer.data.followed_loader import skippable_loader
from mfwrap.trainer.data.parts import UpdateParts
from mfwrap.trainer.data.places import NotedRows
from mfwrap.trainer.data.row_skip import RowSkip
from mfwrap.trainer.view import TrainerView

NO_CHECKPOINT = ""
"""Name that the Trainer's ``_run_epoch`` gets where a training from the start leaves batches out.

The Trainer leaves batches out only if it resumes. A checkpoint of this name has nothing to load.
"""


class DataStart(NamedTuple):
    """Place in the data at which a training begins or resumes."""

    epoch: int
    """Number of whole passes over the data before it."""

    updates: int
    """Number of updates of that pass before it."""

    batches: int
    """Number of micro-batches of that pass before it, on one rank."""


@final
class DataSkip:
    """Skip data without training on them: those of the first updates, and listed rows.

    - A training from the start begins with the data of update ``data_skip_steps``.
    - A training that resumes with the ``data_skip_steps`` of its checkpoint, or without any,
      continues with the data that follow the checkpoint's.
    - A training that resumes with other ``data_skip_steps`` begins with the data of that update,
      whatever ``global_step`` is: for data that have been changed at an earlier resume.

    Listed rows are left out of their micro-batches (`mfwrap.trainer.data.row_skip.RowSkip`). A
    training that resumes leaves out those of its checkpoint, unless others are given. An update
    whose rows are all left out is not made.

    The number of updates is the same as without skipping, so the data may begin another pass.

    Source: MindFormers, ``data_skip_steps``. There a resume always begins at that update, so that a
    run that is resumed with an unchanged file trains on the same data again.

    Args:
        trainer: The trainer.
        parts: Micro-batches of an update.
        data_skip_steps: Number of updates whose data are skipped; ``None`` for none.
        skip_rows: Rows to leave out, or their file; ``None`` for those of the checkpoint.
        may_go_back: Whether the training may go back to a checkpoint, and leave out more rows.

    Raises:
        OSError: If the file of rows cannot be read.
        TypeError: If an argument has another type.
        ValueError: If `data_skip_steps` or the number of a row is negative, or a line of the file
            of rows is wrong.
    """

    def __init__(
        self,
        trainer: TrainerView,
        parts: UpdateParts,
        data_skip_steps: int | None,
        skip_rows: SkipRows | None = None,
        *,
        may_go_back: bool = False,
    ) -> None:
        self._trainer = trainer
        self._steps = data_skip_steps or None
        if data_skip_steps is not None:
            check_int("data_skip_steps", data_skip_steps, minimum=0)
        # Without a number, checkpoints keep that of the checkpoint from which the training resumed.
        self._saved_steps = self._steps
        self.rows = RowSkip(trainer, parts, skip_rows, always_follows=may_go_back)
        """Rows to leave out."""
        self.noted = NotedRows(trainer)
        """Rows that have been dealt, for monitors that name rows."""
        # Steps from which on the update of the data differs from the step by another number.
        self._made: list[tuple[int, int]] = []
        self._offset = 0
        self._epochs_added = 0
        # Present epoch, and number of updates of each epoch, with all rows.
        self._epoch = 0
        self._updates_per_epoch = 1
        self._start: DataStart | None = None
        self.is_moved = False
        """Whether the data of this training do not continue those before it."""

    @contextlib.contextmanager
    def of_training(self) -> Iterator[None]:
        """Follow a training within the block."""
        with self.rows.of_training(), self.noted.of_training():
            yield

    def of_epoch(self, keywords: Mapping[str, Any], *, is_placed: bool) -> dict[str, Any] | None:
        """Return keywords with which an epoch begins where `begin` says, without the rows left out.

        Args:
            keywords: Keywords of the Trainer's ``_run_epoch``.
            is_placed: Whether the loader has restored its place in the data.

        Returns:
            The keywords to call it with; ``None`` for an epoch without any update.
        """
        resumed_from = keywords["resume_from_checkpoint"]
        if self._offset and resumed_from is None:
            resumed_from = NO_CHECKPOINT
        moved: dict[str, Any] = {
            **keywords,
            "epoch": keywords["epoch"] + self._epochs_added,
            "epochs_trained": keywords["epochs_trained"] + self._epochs_added,
            "resume_from_checkpoint": resumed_from,
        }
        is_resumed = resumed_from is not None and moved["epoch"] == moved["epochs_trained"]
        num_done = keywords["steps_trained_in_current_epoch"]
        if is_resumed and num_done > 0:
            moved["train_dataloader"] = skippable_loader(
                keywords["train_dataloader"],
                moved["epoch"],
                num_before=num_done if is_placed else 0,
            )
        return self.rows.of_epoch(moved)

    def batches(self, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Return the batches of the epoch that `begin_epoch` has begun, without rows left out.

        Args:
            batches: Indices of the rows of each of this rank's batches.

        Returns:
            Pairs of the number of a batch among those of an epoch with all rows, and indices.
        """
        return self.noted.noting(self.rows.batches(batches))

    def begin(
        self,
        epochs: int,
        batches: int,
        saved: Mapping[str, Any] | None,
        *,
        max_steps: int,
        updates_per_epoch: int,
        num_epochs: int,
        has_length: bool,
        grown: DataStart | None = None,
    ) -> tuple[int, int]:
        """Return the number of epochs and batches that the Trainer leaves out.

        Args:
            epochs: Number of epochs that the Trainer would leave out.
            batches: Number of batches of the next epoch that the Trainer would leave out.
            saved: State that `state_dict` returned; ``None`` for a training from the start, or from
                a checkpoint that did not skip.
            max_steps: Number of updates of the whole training.
            updates_per_epoch: Number of updates of an epoch.
            num_epochs: Number of epochs of the Trainer.
            has_length: Whether the data loader has a length.
            grown: Where a training whose batch grows begins; ``None`` for any other training.

        Raises:
            ValueError: If data are to be skipped that have no length, rows cannot be left out, or
                the batch grows and the checkpoint has skipped data.
        """
        trainer = self._trainer
        done = trainer.state.global_step
        self._epochs_added = 0
        self._set_offset(saved, done)
        if trainer.args.ignore_data_skip:
            self._offset, self.is_moved = 0, False
        self._updates_per_epoch = updates_per_epoch
        self._made = []
        saved_rows = None if saved is None else saved["rows"]
        self.rows.begin(saved_rows, updates_per_epoch if has_length else 0)
        if grown is not None and (self._offset or self.rows.are_followed):
            refuse_growth("a checkpoint of a training that has left data out")
        end = max_steps + self._offset
        if self.rows.are_followed:
            first = self.rows.settled(done + self._offset)
            end = self.rows.end(first, max_steps - done)
            self._offset = first - done
            trainer.state.epoch = self.rows.progress(first)
        size = trainer.args.gradient_accumulation_steps
        epoch, update = divmod(done + self._offset, updates_per_epoch)
        self._start = start = grown or DataStart(epoch, update, update * size)
        self._epoch = start.epoch - 1
        if grown is not None:
            return start.epoch, 0 if trainer.args.ignore_data_skip else start.batches
        if end == max_steps:
            return epochs, batches
        if not has_length:
            msg = (
                "`data_skip_steps` needs training data with a length, got "
                f"data_skip_steps={self._steps} and data without one; skip the rows in the data, "
                "for example by `dataset.skip(number)`"
            )
            raise ValueError(msg)
        passes = math.ceil(end / updates_per_epoch)
        # The Trainer ends after `num_epochs` epochs, so count from so much earlier.
        self._epochs_added = passes - num_epochs
        return start.epoch - self._epochs_added, start.batches

    def begin_epoch(
        self,
        loader: Any,
        first_slots: Callable[[int], Sequence[int] | None],
        *,
        is_resumed: bool,
    ) -> DataStart | None:
        """Return where the next epoch begins in the data; ``None`` for an epoch as any other.

        Args:
            loader: Data loader of the epoch.
            first_slots: Returns the first micro-batch of each update of an epoch; ``None`` if all
                updates have equally many.
            is_resumed: Whether the epoch is the first one after a resume.
        """
        start, self._start = self._start, None
        self._epoch += 1
        first_update = 0 if start is None else start.updates
        left_out = None
        if self.rows.are_followed:
            if start is None:
                # A callback may have ended the former epoch before its end.
                first = self._epoch * self._updates_per_epoch
                self._offset = max(self._offset, first - self._trainer.state.global_step)
            left_out = self.rows.begin_epoch(loader, self._epoch, first_update)
        self.noted.begin_epoch(
            loader, self._epoch, first_update, self._updates_per_epoch, left_out, first_slots
        )
        return start if is_resumed or self._offset else None

    def count_update(self) -> None:
        """Add the updates without rows that come before the update that has just been made.

        Call it after each update if `RowSkip.are_followed`.
        """
        state = self._trainer.state
        following = self.rows.end(state.global_step - 1 + self._offset, 1)
        difference = following - 1 - state.global_step
        if not self._made or self._made[-1][1] != difference:
            self._made.append((state.global_step, difference))
        following = self.rows.settled(following)
        self._offset = following - state.global_step
        state.epoch = self.rows.progress(following)

    def rows_of_steps(
        self,
        steps: tuple[int, int],
        updates_around: tuple[int, int],
        named: Collection[tuple[int, int, int]] = (),
    ) -> frozenset[SkippedRow]:
        """Return the rows of steps of this training, and of updates of the data around them.

        Args:
            steps: First and last step.
            updates_around: Number of updates of the data before the first step and after the last.
            named: If given, return only these rows of the steps: rank, micro-batch of the rank, and
                row in the micro-batch. Rows that have not been trained on are left out.
        """
        first, last = map(self._update_of, steps)
        begin, end = max(first - updates_around[0], 0), last + updates_around[1]
        places = [self.rows.position(first, *row) for row in named]
        found = frozenset(place for place in places if place is not None)
        whole = set(range(begin, end + 1)) - (set(range(first, last + 1)) if found else set())
        return found.union(*(self.rows.positions(update) for update in whole))

    def _update_of(self, step: int) -> int:
        """Return the update of the data that a step of this training was made on."""
        known = [difference for begin, difference in self._made if begin <= step]
        return step + (known[-1] if known else self._made[0][1])

    def _set_offset(self, saved: Mapping[str, Any] | None, done: int) -> None:
        former: Mapping[str, Any] = {"steps": None, "offset": 0} if saved is None else saved
        self._saved_steps = former["steps"] if self._steps is None else self._steps
        self.is_moved = done > 0 and self._saved_steps != former["steps"]
        if done == 0 or self.is_moved:
            self._offset = (self._steps or 0) - done
        else:
            self._offset = former["offset"]

    def state_dict(self) -> dict[str, Any]:
        """Return what a resume needs, as JSON values."""
        return {
            "steps": self._saved_steps,
            "offset": self._offset,
            "rows": self.rows.state_dict(),
        }


def refuse_growth(what: str) -> NoReturn:
    """Raise because the batch grows, and data are left out by the number of an update.

    Args:
        what: What leaves data out.

    Raises:
        ValueError: Always.
    """
    msg = (
        f"`rampup_batch_size` cannot be combined with {what}, which counts updates of one size; "
        "use one of them"
    )
    raise ValueError(msg)
