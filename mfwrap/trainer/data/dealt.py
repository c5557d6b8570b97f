"""Where the rows of a pass over the data go: to which update, micro-batch and rank."""

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, NoReturn, Self, final

from accelerate.data_loader import BatchSamplerShard, DataLoaderDispatcher
from torch.utils.data import BatchSampler, IterableDataset

_USE_SAMPLER = "use torch's BatchSampler"


class Dealing(NamedTuple):
    """How accelerate deals the rows of a pass over the data.

    A *slot* is a micro-batch on all ranks together. Each slot takes the next rows of the pass, and
    each rank takes an equal part of these rows.
    """

    num_rows: int
    """Number of rows in the order of the sampler."""

    batch_size: int
    """Number of rows of a micro-batch on one rank."""

    num_ranks: int
    rank: int
    num_slots: int
    """Number of micro-batches of a pass on one rank."""

    first_slots: Sequence[int]
    """First slot of each update of a pass."""

    fills_up: bool
    """Whether the last slot is filled up with the first rows of the pass."""

    @classmethod
    def of_loader(cls, loader: Any, accumulation_steps: int) -> Self:
        """Return how a prepared data loader deals its rows.

        Args:
            loader: Data loader that accelerate has prepared.
            accumulation_steps: Number of micro-batches of an update on one rank.

        Raises:
            ValueError: If rows of this loader have no place that can be computed.
        """
        dispatches = isinstance(loader, DataLoaderDispatcher) and loader.state.num_processes > 1
        if isinstance(getattr(loader, "dataset", None), IterableDataset):
            _refuse("an iterable data set", "leave the rows out in the data set")
        if dispatches:
            remedy = "set `dispatch_batches` of `accelerator_config` to False"
            _refuse("`dispatch_batches` on several ranks", remedy)
        sampler = getattr(loader, "batch_sampler", None)
        shard = sampler if isinstance(sampler, BatchSamplerShard) else None
        base = sampler if shard is None else shard.batch_sampler
        batch_size, num_rows = getattr(base, "batch_size", None), _length(base)
        if not isinstance(base, BatchSampler) or type(batch_size) is not int or num_rows is None:
            _refuse(f"a data loader with {type(base).__name__}", _USE_SAMPLER)
        num_slots = len(loader)
        first_slots = range(0, num_slots, accumulation_steps)
        if shard is None:
            return cls(num_rows, batch_size, 1, 0, num_slots, first_slots, fills_up=False)
        return cls(
            num_rows,
            batch_size // shard.num_processes if shard.split_batches else batch_size,
            shard.num_processes,
            shard.process_index,
            num_slots,
            first_slots,
            shard.even_batches and not shard.drop_last,
        )

    @property
    def rows_per_slot(self) -> int:
        """Number of rows of a micro-batch on all ranks."""
        return self.num_ranks * self.batch_size

    @property
    def num_updates(self) -> int:
        """Number of updates of a pass."""
        return len(self.first_slots)

    def slots(self, update: int) -> range:
        """Return the slots of an update of a pass."""
        bounds = (*self.first_slots[update : update + 2], self.num_slots, self.num_slots)
        return range(bounds[0], bounds[1])

    def update(self, slot: int) -> int:
        """Return the update of a pass that a slot belongs to."""
        return bisect_right(self.first_slots, slot) - 1

    def positions(self, slot: int, rank: int) -> list[int]:
        """Return the positions of a rank's rows in a slot.

        Rows that fill up the last slot have the positions at which they were in the first slots.
        """
        first = (slot * self.num_ranks + rank) * self.batch_size
        numbers = range(first, first + self.batch_size)
        if self.fills_up:
            return [number % self.num_rows for number in numbers]
        return [number for number in numbers if number < self.num_rows]


def _length(batch_sampler: Any) -> int | None:
    """Return the number of rows that a batch sampler takes from its sampler, if it is known."""
    try:
        return len(batch_sampler.sampler)
    except (AttributeError, TypeError):
        return None


def _refuse(what: str, remedy: str) -> NoReturn:
    msg = (
        "`skip_rows` and `rollback` need a map-style data set that each rank reads in batches of "
        f"a fixed size, got {what}; {remedy}"
    )
    raise ValueError(msg)


@final
class EpochRows:
    """Rows that are left out of one pass over the data.

    Args:
        dealing: How rows are dealt.
        skipped: Positions of the rows that are left out.
        first_update: Update of the pass at which the training begins or resumes. Rows of earlier
            updates count as kept.
    """

    def __init__(
        self, dealing: Dealing, skipped: frozenset[int] = frozenset(), first_update: int = 0
    ) -> None:
        self.dealing = dealing
        self.first_update = first_update
        self._skipped = skipped
        self._offsets = {
            slot: [self._kept(slot, rank) for rank in range(dealing.num_ranks)]
            for slot in self._slots_with_skipped_rows()
        }
        # Slots from the first update on that lack rows, each with its number of ranks with rows.
        first = dealing.slots(first_update).start if first_update else 0
        self._num_filled = {
            slot: sum(1 for offsets in of_ranks if offsets)
            for slot, of_ranks in self._offsets.items()
            if slot >= first
        }

    def _slots_with_skipped_rows(self) -> list[int]:
        dealing = self.dealing
        slots = {position // dealing.rows_per_slot for position in self._skipped}
        # Rows that fill up the last slot are the first ones of the pass.
        num_filling = dealing.num_slots * dealing.rows_per_slot - dealing.num_rows
        if dealing.fills_up and any(position < num_filling for position in self._skipped):
            slots.add(dealing.num_slots - 1)
        return sorted(slot for slot in slots if slot < dealing.num_slots)

    def _kept(self, slot: int, rank: int) -> list[int]:
        """Return which of a rank's rows in a slot are kept, counted from 0."""
        dealing = self.dealing
        first = slot * dealing.rows_per_slot
        own = range(first, min(first + dealing.rows_per_slot, dealing.num_rows))
        if all(position in self._skipped for position in own):
            return []  # rows that fill up a slot are not trained on by themselves
        positions = dealing.positions(slot, rank)
        return [n for n, position in enumerate(positions) if position not in self._skipped]

    def num_filled(self, slot: int) -> int:
        """Return on how many ranks a slot has rows."""
        return self._num_filled.get(slot, self.dealing.num_ranks)

    def is_filled_here(self, slot: int) -> bool:
        """Return whether this rank has rows in a slot."""
        return slot not in self._num_filled or bool(self._offsets[slot][self.dealing.rank])

    def lacks_rows(self, update: int) -> bool:
        """Return whether rows of an update are left out, on any rank."""
        return any(slot in self._num_filled for slot in self.dealing.slots(update))

    @cached_property
    def empty_updates(self) -> list[int]:
        """Updates of which no rank has rows, in order."""
        return [
            update
            for update in dict.fromkeys(map(self.dealing.update, self._num_filled))
            if not any(self.num_filled(slot) for slot in self.dealing.slots(update))
        ]

    @property
    def num_empty_slots(self) -> int:
        """Number of slots in the updates of which no rank has rows."""
        return sum(len(self.dealing.slots(update)) for update in self.empty_updates)

    def updates(self) -> Iterator[int]:
        """Return the updates from the first one on that are trained on."""
        empty = set(self.empty_updates)
        numbers = range(self.first_update, self.dealing.num_updates)
        return (update for update in numbers if update not in empty)

    def update_after(self, number: int) -> int | None:
        """Return the update before which so many others are trained on; ``None`` at the end.

        Args:
            number: Number of updates that are trained on from the first one on.
        """
        update = self.first_update + number
        for empty in self.empty_updates:
            if empty > update:
                break
            update += 1
        return update if update < self.dealing.num_updates else None

    def batches(self, batches: Iterable[list[Any]]) -> Iterator[tuple[int, list[Any]]]:
        """Return this rank's batches without the rows that are left out, each with its slot.

        - A slot without rows on all ranks is left out.
        - A slot without rows on this rank only has one row of another slot: all ranks must do
          forward and backward. `mfwrap.trainer.data.row_skip.RowSkip` gives it no weight.

        Args:
            batches: Indices of the rows of each of this rank's batches.

        Raises:
            ValueError: If a batch has another number of rows than expected.
        """
        dealing = self.dealing
        other: list[Any] = []
        waiting: list[int] = []
        for slot, batch in enumerate(batches):
            expected = len(dealing.positions(slot, dealing.rank))
            if len(batch) != expected:
                _refuse(f"a batch of {len(batch)} rows instead of {expected}", _USE_SAMPLER)
            kept = batch
            if slot in self._offsets:
                kept = [batch[n] for n in self._offsets[slot][dealing.rank]]
            other = other or kept[:1]
            if self.num_filled(slot) == 0:
                continue
            rows = (kept or other) if slot in self._num_filled else batch
            if not rows:
                waiting.append(slot)
                continue
            yield from ((earlier, other) for earlier in waiting)
            waiting.clear()
            yield slot, rows

    def position(self, update: int, rank: int, micro_batch: int, row: int) -> int | None:
        """Return the position of a row that is kept; ``None`` if there is no such row.

        Args:
            update: Update of the pass.
            rank: Rank of the row.
            micro_batch: Number of the micro-batch among those of the update that are trained on.
            row: Number of the row among those of the micro-batch that are kept.
        """
        kept = list(self.kept_positions(update, rank).values())
        if micro_batch >= len(kept):
            return None
        positions = kept[micro_batch]
        return positions[row] if row < len(positions) else None

    def kept_positions(self, update: int, rank: int) -> dict[int, list[int]]:
        """Return the positions of a rank's rows of an update, by the slots that are trained on."""
        kept = {}
        for slot in self.dealing.slots(update):
            positions = self.dealing.positions(slot, rank)
            if slot in self._offsets:
                positions = [positions[n] for n in self._offsets[slot][rank]]
            if self.num_filled(slot):
                kept[slot] = positions
        return kept

    def check(self, epoch: int) -> None:
        """Raise unless all positions are in the pass, and all ranks have rows or none has.

        Args:
            epoch: Number of the pass, for the message.

        Raises:
            ValueError: If a position is too large, or a rank has no row left.
        """
        dealing = self.dealing
        last = max(self._skipped, default=0)
        if last >= dealing.num_rows:
            msg = (
                f"`skip_rows` has position {last} of epoch {epoch}, but an epoch has "
                f"{dealing.num_rows} rows: positions 0 to {dealing.num_rows - 1}"
            )
            raise ValueError(msg)
        if len(self._offsets) < dealing.num_slots:
            return  # a slot has all its rows, on every rank
        filled = [
            any(of_ranks[rank] for of_ranks in self._offsets.values())
            for rank in range(dealing.num_ranks)
        ]
        if any(filled) and not all(filled):
            msg = (
                f"`skip_rows` leaves rank {filled.index(False)} no row of epoch {epoch}, and other "
                "ranks some; leave out all rows of the epoch, or fewer"
            )
            raise ValueError(msg)
