"""Tell monitors where the rows of the last steps are in the training data."""

import contextlib
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, final

from mfwrap.compatibility.transformers import makes_batches_itself
from mfwrap.records.skipped_rows import RowPlace, SkippedRow, unknown_source
from mfwrap.trainer.data.dealt import Dealing, EpochRows
from mfwrap.trainer.events import MonitorCallback, monitors
from mfwrap.trainer.loss_again import loss_of_batch
from mfwrap.trainer.view import TrainerView


class DealtRows(NamedTuple):
    """Rows of a micro-batch on this rank."""

    epoch: int
    """Number of the pass over the data."""

    indices: Sequence[Any]
    """Indices of the rows in the data set."""

    positions: Sequence[int]
    """Places of the rows in the order of the pass; fewer than `indices` for a row that only stands
    in for rows of other ranks."""


@final
class NotedRows:
    """Note which rows of the data set this rank's batch sampler deals, for monitors that name rows.

    Rows are noted as they are dealt, so the order of a sampler is never computed again, and no
    random numbers are drawn. A step costs one append to a list for each batch, and only if a
    monitor names rows.

    Rows stay unknown if they have no place that `skip_rows` takes: those of an iterable data set,
    of a batch sampler other than torch's, with ``dispatch_batches`` on several ranks, with
    ``ignore_data_skip``, or of a Trainer that makes its own batches (TRL's GRPO).

    Args:
        trainer: The trainer.
    """

    def __init__(self, trainer: TrainerView) -> None:
        self._trainer = trainer
        self.takers: list[MonitorCallback] = []
        """Monitors that name rows."""
        self.needed_by = ""
        """Argument of the trainer that needs the rows, in words; empty if only monitors do."""
        self.source_of: Callable[[int], str | None] = unknown_source
        """Returns file and line of the row of the data set with an index, if they are known."""
        # A step is judged in the next step, which may belong to the next epoch.
        self._epochs: deque[_NotedEpoch] = deque(maxlen=2)

    def begin(self) -> None:
        """Give `places` and the Trainer to the monitors that name rows.

        Call it before ``on_train_begin``.
        """
        callbacks = monitors(self._trainer.callback_handler.callbacks)
        self.takers = [callback for callback in callbacks if callback.names_rows]
        for callback in self.takers:
            callback.take_row_places(self.places)
            callback.take_trainer(self._trainer, loss_of_batch(self._trainer))

    @contextlib.contextmanager
    def of_training(self) -> Iterator[None]:
        """Take them from the monitors after the block."""
        self._epochs.clear()
        try:
            yield
        finally:
            for callback in self.takers:
                callback.take_row_places(None)
                callback.take_trainer(None)
            self.takers = []

    def begin_epoch(
        self,
        loader: Any,
        epoch: int,
        first_update: int,
        updates_per_epoch: int,
        left_out: EpochRows | None,
        first_slots: Callable[[int], Sequence[int] | None],
    ) -> None:
        """Note the rows of an epoch.

        Args:
            loader: Data loader of the epoch.
            epoch: Number of the epoch.
            first_update: Update of the epoch at which the training begins or resumes.
            updates_per_epoch: Number of updates of an epoch with all rows.
            left_out: Rows of the epoch that are left out; ``None`` for none.
            first_slots: Returns the first micro-batch of each update of an epoch; ``None`` if all
                updates have equally many.

        Raises:
            ValueError: If an argument of the trainer needs the rows, and they are unknown.
        """
        if not self._is_on:
            return
        trainer = self._trainer
        grown = first_slots(epoch)
        updates_per_epoch = updates_per_epoch if grown is None else len(grown)
        rows = self._whole_epoch(loader, first_update, grown) if left_out is None else left_out
        is_unknown = trainer.args.ignore_data_skip or makes_batches_itself(trainer)
        if rows is None or is_unknown or rows.dealing.num_updates != updates_per_epoch:
            rows = None
        if self.needed_by and (rows is None or rows.dealing.num_ranks != trainer.args.world_size):
            msg = (
                f"{self.needed_by} must be left out with this data loader "
                f"({type(loader).__name__}): it needs a map-style data set that each rank reads in "
                "batches of a fixed size, rows of its own on each rank, and `ignore_data_skip` "
                "False"
            )
            raise ValueError(msg)
        num_ahead = (getattr(loader, "num_workers", 0) or 0) * (
            getattr(loader, "prefetch_factor", None) or 2
        )
        # The batches of the last two updates, those that workers are making, and a few more.
        num_kept = 3 * trainer.args.gradient_accumulation_steps + num_ahead + 4
        self._epochs.append(_NotedEpoch(epoch, trainer.state.global_step, rows, num_kept))

    def _whole_epoch(
        self, loader: Any, first_update: int, first_slots: Sequence[int] | None
    ) -> EpochRows | None:
        """Return an epoch without rows left out; ``None`` if it is unknown where its rows go."""
        try:
            dealing = Dealing.of_loader(loader, self._trainer.args.gradient_accumulation_steps)
        except ValueError:
            return None
        if first_slots is not None:
            dealing = dealing._replace(first_slots=first_slots)
        return EpochRows(dealing, first_update=first_update)

    def noting(self, batches: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Return the batches of the epoch that `begin_epoch` has begun, and note their rows.

        Args:
            batches: Indices of the rows of each batch, with the slot of the batch.
        """
        return self._epochs[-1].noting(batches) if self._is_on else iter(batches)

    @property
    def _is_on(self) -> bool:
        return bool(self.takers or self.needed_by)

    def places(self, step: int, sizes: Sequence[int]) -> Sequence[Sequence[RowPlace | None]]:
        """Return the places of this rank's rows in a step; see `RowPlaces`.

        Args:
            step: One of the last two steps, counted from 1 over the whole training.
            sizes: Number of rows of each micro-batch of the rank. The places of a micro-batch of
                another size than the sampler's, for example of packed texts, are ``None``.
        """
        batches = self.of_step(step)
        # A network that is called twice per micro-batch has more calls than there are slots.
        if len(batches) != len(sizes):
            return ()
        pairs = zip(batches, sizes, strict=True)
        return [_places(batch, size, self.source_of) for batch, size in pairs]

    def of_step(self, step: int) -> Sequence[DealtRows]:
        """Return this rank's rows in each micro-batch of a step; empty if they are unknown.

        Args:
            step: One of the last two steps, or the present one, counted from 1 over the whole
                training.
        """
        epochs = [each for each in self._epochs if each.steps_before < step]
        return epochs[-1].of_step(step) if epochs else ()


@final
class _NotedEpoch:
    """Rows that the batch sampler has dealt last in a pass over the data.

    Args:
        number: Number of the pass.
        steps_before: Steps of the training before the pass.
        rows: Rows that are left out; ``None`` if it is unknown where rows go.
        num_kept: Number of batches that are kept.
    """

    def __init__(
        self, number: int, steps_before: int, rows: EpochRows | None, num_kept: int
    ) -> None:
        self.steps_before = steps_before
        # Slots with the indices of this rank's rows.
        self._dealt: deque[tuple[int, Sequence[Any]]] = deque(maxlen=num_kept)
        self._number = number
        self._rows = rows

    def noting(self, batches: Iterable[tuple[int, Any]]) -> Iterator[tuple[int, Any]]:
        """Yield batches with their slots, and note them."""
        for slot, indices in batches:
            self._dealt.append((slot, indices))
            yield slot, indices

    def of_step(self, step: int) -> Sequence[DealtRows]:
        """Return the rows of a step, as `NotedRows.of_step` does."""
        rows = self._rows
        update = None if rows is None else rows.update_after(step - self.steps_before - 1)
        if rows is None or update is None:
            return ()
        dealt = dict(self._dealt)
        kept = rows.kept_positions(update, rows.dealing.rank)
        if not kept.keys() <= dealt.keys():
            return ()
        return [DealtRows(self._number, dealt[slot], positions) for slot, positions in kept.items()]


def _places(
    batch: DealtRows, size: int, source_of: Callable[[int], str | None]
) -> Sequence[RowPlace | None]:
    unknown = [None] * size
    if not len(batch.indices) == len(batch.positions) == size:
        return unknown
    try:
        numbers = [operator.index(index) for index in batch.indices]
    except TypeError:
        return unknown  # the sampler yields keys
    return [
        RowPlace(index, SkippedRow(batch.epoch, position), source_of)
        for index, position in zip(numbers, batch.positions, strict=True)
    ]
