"""Leave listed rows out of the training data of an `MFTrainer`: ``skip_rows``."""

import contextlib
import zlib
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import Sampler

from mfwrap.compatibility.transformers import COUNT_ITEMS, method_of
from mfwrap.records.skipped_rows import SkippedRow, SkipRows, skipped_rows
from mfwrap.trainer.data.dealt import Dealing, EpochRows
from mfwrap.trainer.data.parts import Part, UpdateParts
from mfwrap.trainer.view import TrainerView

_IGNORED = -100
"""Label that transformers does not count as a target."""


_NO_DEALING = Dealing(1, 1, 1, 0, 1, range(1), fills_up=False)
"""Placeholder before a training has begun."""


@final
class RowSkip:
    """Leave rows out of the micro-batches that they belong to.

    No other row takes the place of a row that is left out:

    - Its micro-batch has fewer rows. The loss of an update is the mean over its targets if the
      Trainer counts them, and else the mean over those micro-batches that have rows, on all ranks.
    - A micro-batch without rows on all ranks is not trained on.
    - A micro-batch without rows on some ranks trains there on a row of another micro-batch with
      weight 0, because all ranks must do forward and backward together.
    - An update without rows is not made, and not counted.

    Rows that fill up the last micro-batches of an epoch, so that all ranks have equally many, are
    left out with the row that they repeat.

    Args:
        trainer: The trainer.
        parts: Micro-batches of an update.
        skip_rows: Rows to leave out, or their file; ``None`` for those of the checkpoint.
        always_follows: Whether to follow rows even if none is left out, because `positions` is
            needed.

    Raises:
        OSError: If the file cannot be read.
        TypeError: If `skip_rows` has another type.
        ValueError: If a line of the file or a number is wrong.
    """

    def __init__(
        self,
        trainer: TrainerView,
        parts: UpdateParts,
        skip_rows: SkipRows | None,
        *,
        always_follows: bool,
    ) -> None:
        self._trainer = trainer
        self._parts = parts
        self._given = None if skip_rows is None else skipped_rows(skip_rows)
        self.present: frozenset[SkippedRow] = self._given or frozenset()
        """Rows that the present training leaves out."""
        self._added: frozenset[SkippedRow] = frozenset()
        self._always_follows = always_follows
        self._loader: Any = None
        self._epochs: dict[int, EpochRows] = {}
        self._empty: list[int] = []
        # Of the present epoch, and of its update that is being trained on.
        self._epoch = EpochRows(_NO_DEALING)
        self._updates: Iterator[int] = iter(())
        self.are_followed = False
        """Whether it is known to which update a row belongs."""

    @property
    def fact(self) -> str:
        """Description of the rows that were given, to be compared across ranks."""
        return "none" if self._given is None else _described(self._given)

    @property
    def present_fact(self) -> str:
        """Description of the rows that the present training leaves out."""
        return _described(self.present) if self.present else "none"

    @contextlib.contextmanager
    def of_training(self) -> Iterator[None]:
        """Follow a training within the block."""
        try:
            yield
        finally:
            self._loader = None
            self.are_followed = False
            self._parts.clear()

    def add(self, rows: frozenset[SkippedRow]) -> None:
        """Leave out further rows in the next training; call it before `begin`."""
        self._added = rows

    def note_loader(self, loader: Any) -> None:
        """Note the data loader of the training; call it before `begin`."""
        self._loader = loader

    def begin(self, saved: Iterable[Collection[int]] | None, updates_per_epoch: int) -> None:
        """Prepare a training, and follow its rows if necessary.

        Args:
            saved: Rows that `state_dict` returned; ``None`` for a training from the start.
            updates_per_epoch: Number of updates of an epoch with all rows; 0 for data without a
                length.

        Raises:
            ValueError: If the data do not allow to leave out rows, or an epoch lacks such a row.
        """
        trainer = self._trainer
        given = self._given
        if given is None:
            given = frozenset(SkippedRow(*each) for each in saved or ())
        self.present = given | self._added
        self._epochs, self._empty = {}, []
        self._epoch = EpochRows(_NO_DEALING)
        self.are_followed = False
        if not self.present and not self._always_follows:
            return
        if trainer.args.ignore_data_skip:
            msg = (
                "`ignore_data_skip` must be False with `skip_rows` or `rollback`, got True: the "
                "positions of rows count from the start of an epoch"
            )
            raise ValueError(msg)
        dealing = Dealing.of_loader(self._loader, trainer.args.gradient_accumulation_steps)
        if dealing.num_updates != updates_per_epoch:
            msg = (
                f"`skip_rows` needs epochs of {dealing.num_updates} updates, as the data loader "
                f"has, got {updates_per_epoch}; do not use sequence parallelism"
            )
            raise ValueError(msg)
        self._epoch = EpochRows(dealing)
        for epoch in sorted({row.epoch for row in self.present}):
            rows = self._rows_of(epoch)
            rows.check(epoch)
            self._epochs[epoch] = rows
            self._empty += [epoch * updates_per_epoch + update for update in rows.empty_updates]
        self.are_followed = True

    def _rows_of(self, epoch: int, first_update: int = 0) -> EpochRows:
        skipped = frozenset(row.position for row in self.present if row.epoch == epoch)
        return EpochRows(self._epoch.dealing, skipped, first_update)

    def positions(self, update: int) -> frozenset[SkippedRow]:
        """Return all rows of an update, counted from the start of the data."""
        dealing = self._epoch.dealing
        epoch, of_epoch = divmod(update, dealing.num_updates)
        slots, size = dealing.slots(of_epoch), dealing.rows_per_slot
        last = min(slots.stop * size, dealing.num_rows)
        return frozenset(SkippedRow(epoch, row) for row in range(slots.start * size, last))

    def position(self, update: int, rank: int, micro_batch: int, row: int) -> SkippedRow | None:
        """Return the place of a row that has been trained on; ``None`` if there is no such row.

        Args:
            update: Update, counted from the start of the data.
            rank: Rank of the row.
            micro_batch: Number of the micro-batch among those of the rank that have been trained.
            row: Number of the row in the micro-batch.
        """
        epoch, of_epoch = divmod(update, self._epoch.dealing.num_updates)
        position = self._rows_of(epoch).position(of_epoch, rank, micro_batch, row)
        return None if position is None else SkippedRow(epoch, position)

    def settled(self, update: int) -> int:
        """Return an update, or the start of the next epoch that has rows if its own has none left.

        Args:
            update: Number of the update from the start of the data, with all rows.
        """
        per_epoch = self._epoch.dealing.num_updates
        while self.end(update, 1) > (update // per_epoch + 1) * per_epoch:
            update = (update // per_epoch + 1) * per_epoch
        return update

    def end(self, update: int, number: int) -> int:
        """Return the update after so many updates that have rows.

        Args:
            update: First update, counted from the start of the data, with all rows.
            number: Number of updates.
        """
        end = update + number
        for index in range(bisect_left(self._empty, update), len(self._empty)):
            if self._empty[index] >= end:
                break
            end += 1
        return end

    def progress(self, update: int) -> float:
        """Return the number of epochs before an update, as in the Trainer's ``state.epoch``."""
        dealing = self._epoch.dealing
        epoch, update = divmod(update, dealing.num_updates)
        return epoch + dealing.slots(update).start / dealing.num_slots

    def begin_epoch(self, loader: Any, epoch: int, first_update: int) -> EpochRows:
        """Leave out rows of an epoch, and return the rows that are left out.

        Args:
            loader: Data loader of the epoch.
            epoch: Number of the epoch.
            first_update: Update of the epoch at which the training begins or resumes.

        Raises:
            ValueError: If the loader's batch sampler is not torch's or accelerate's.
        """
        sampler = loader.batch_sampler
        if not isinstance(sampler, Sampler):
            msg = f"`skip_rows` needs a torch Sampler, got {type(sampler).__name__}"
            raise ValueError(msg)  # noqa: TRY004  (a value of the loader)
        is_whole = first_update == 0 and epoch not in self._epochs
        self._epoch = self._rows_of(-1) if is_whole else self._rows_of(epoch, first_update)
        self._updates = self._epoch.updates()
        return self._epoch

    def of_epoch(self, keywords: dict[str, Any]) -> dict[str, Any] | None:
        """Return keywords of the Trainer's ``_run_epoch`` for the updates that have rows.

        Args:
            keywords: Keywords for an epoch with all rows.

        Returns:
            The keywords; ``None`` without any update, because the Trainer would end the training.
        """
        rows = self._epoch
        if not rows.empty_updates:
            return keywords
        num_updates = keywords["num_update_steps_per_epoch"] - len(rows.empty_updates)
        if num_updates <= rows.first_update:
            return None
        steps = keywords["steps_in_epoch"] - rows.num_empty_slots
        return {**keywords, "num_update_steps_per_epoch": num_updates, "steps_in_epoch": steps}

    def batches(self, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """Yield the batches of the epoch that `begin_epoch` has begun, without rows left out.

        Args:
            batches: Indices of the rows of each of this rank's batches.

        Returns:
            Pairs of a slot, which is the number of a batch among those of an epoch with all rows,
            and indices.
        """
        return self._epoch.batches(batches) if self.are_followed else enumerate(batches)

    def read(
        self,
        read: Callable[..., tuple[list[Any], Any]],
        epoch_iterator: Iterator[Any],
        num_batches: int,
        device: torch.device,
    ) -> tuple[list[Any], Any]:
        """Read the micro-batches of an update that have rows, and count their targets.

        Args:
            read: The Trainer's ``get_batch_samples``, which takes the other arguments.
            epoch_iterator: Iterator over the micro-batches of the epoch.
            num_batches: Number of micro-batches of an update with all rows.
            device: Device of the number of targets.
        """
        if not self.are_followed:
            return read(epoch_iterator, num_batches, device)
        rows, update = self._epoch, next(self._updates, None)
        self._parts.begin()
        if update is None or not rows.lacks_rows(update):
            return read(epoch_iterator, num_batches, device)
        slots = rows.dealing.slots(update)
        filled = [slot for slot in slots if rows.num_filled(slot)]
        batches = [next(epoch_iterator) for _ in filled]
        stands_in = [not rows.is_filled_here(slot) for slot in filled]
        # The Trainer divides by the number of micro-batches of a rank, and the gradients are
        # averaged over the ranks.
        total, num_ranks = sum(map(rows.num_filled, filled)), rows.dealing.num_ranks
        divisor = total // num_ranks if total % num_ranks == 0 else total / num_ranks
        counted = [
            _without_targets(batch) if each else batch
            for batch, each in zip(batches, stands_in, strict=True)
        ]
        if all(stands_in) and not self._trainer.args.average_tokens_across_devices:
            counted = batches  # a rank that divides by its own number must not divide by 0
        num_items = method_of(self._trainer, COUNT_ITEMS)(counted, device)
        parts = [Part.STAND_IN if each else Part.ROWS for each in stands_in]
        number = len(slots) - len(filled)
        return self._parts.begin_with_empty(number, parts, batches, divisor), num_items

    def state_dict(self) -> list[list[int]]:
        """Return the rows that are left out, as JSON values."""
        return sorted([row.epoch, row.position] for row in self.present)


def _without_targets(batch: Any) -> Any:
    """Return a batch whose labels are ignored when the Trainer counts targets."""
    if not isinstance(batch, Mapping):
        return batch
    ignored = {
        name: torch.full_like(batch[name], _IGNORED)
        for name in ("labels", "shift_labels")
        if isinstance(batch.get(name), Tensor)
    }
    return {**batch, **ignored}


def _described(rows: frozenset[SkippedRow]) -> str:
    checksum = zlib.crc32(str(sorted(map(tuple, rows))).encode())
    return f"{len(rows)} with checksum {checksum:08x}"
