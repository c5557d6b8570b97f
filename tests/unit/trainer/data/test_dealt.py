"""The places of rows agree with the batches that accelerate deals to ranks."""

from typing import NamedTuple

import pytest
from accelerate.data_loader import BatchSamplerShard
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from mfwrap.trainer.data.dealt import Dealing, EpochRows


class Loader(NamedTuple):
    """The two things of a data loader that say how rows are dealt."""

    batch_sampler: BatchSampler
    num_batches: int

    def __len__(self) -> int:
        return self.num_batches


@st.composite
def loaders(draw) -> list[Loader]:
    """Return the loaders of all ranks, whose rows are their own positions."""
    num_ranks = draw(st.integers(1, 4))
    batch_size = draw(st.integers(1, 3))
    num_rows = draw(st.integers(1, 40))
    drop_last, splits = draw(st.booleans()), draw(st.booleans())
    shards = [
        BatchSampler(range(num_rows), batch_size * (num_ranks if splits else 1), drop_last)
        for _ in range(num_ranks)
    ]
    if num_ranks > 1:
        shards = [
            BatchSamplerShard(shard, num_ranks, rank, splits) for rank, shard in enumerate(shards)
        ]
    return [Loader(shard, len(shard)) for shard in shards]


@given(loaders(), st.integers(1, 3), st.data())
def test_rows_are_where_accelerate_deals_them(of_ranks, steps, data):
    """Batches lack exactly the rows that are left out; updates without any are empty."""
    dealt = [list(loader.batch_sampler) for loader in of_ranks]
    for loader, batches in zip(of_ranks, dealt, strict=True):
        dealing = Dealing.of_loader(loader, steps)
        found = [dealing.positions(slot, dealing.rank) for slot in range(dealing.num_slots)]
        assert found == batches

    num_rows = dealing.num_rows
    skipped = data.draw(st.frozensets(st.integers(0, num_rows - 1)))
    first = data.draw(st.integers(0, max(dealing.num_updates - 1, 0)))
    epochs = [EpochRows(Dealing.of_loader(each, steps), skipped, first) for each in of_ranks]
    kept_by_ranks = [any({*batch} - skipped for batch in batches) for batches in dealt]
    if any(kept_by_ranks) and not all(kept_by_ranks):
        with pytest.raises(ValueError, match=f"leaves rank {kept_by_ranks.index(False)} no row of"):
            epochs[0].check(0)
        return
    epochs[0].check(0)
    size, steps_before = dealing.rows_per_slot, first * steps
    own = [range(n * size, min((n + 1) * size, num_rows)) for n in range(dealing.num_slots)]
    full = [n < steps_before or not skipped >= {*rows} for n, rows in enumerate(own)]
    updates = range(dealing.num_updates)
    empty = [n for n in updates if not any(full[slot] for slot in dealing.slots(n))]
    lacking = {
        slot // steps
        for slot in range(steps_before, dealing.num_slots)
        if any(skipped & {*batches[slot]} for batches in dealt)
    }
    for epoch, batches in zip(epochs, dealt, strict=True):
        assert {n for n in updates if epoch.lacks_rows(n)} == lacking
        found = dict(epoch.batches(batches))
        assert list(found) == [slot for slot, is_full in enumerate(full) if is_full]
        assert epoch.empty_updates == empty
        trained = [n for n in updates[first:] if n not in empty]
        assert [*epoch.updates()] == trained
        assert [epoch.update_after(n) for n in range(len(trained) + 1)] == [*trained, None]
        assert epoch.num_empty_slots == sum(len(dealing.slots(update)) for update in empty)
        for slot, batch in found.items():
            kept = [row for row in batches[slot] if row not in skipped or slot < steps_before]
            assert epoch.is_filled_here(slot) == bool(kept)
            if slot >= steps_before:
                assert epoch.num_filled(slot) == sum(bool({*b[slot]} - skipped) for b in dealt)
            # A rank without rows has one row of another slot.
            update = slot // steps
            number = [each for each in found if each // steps == update].index(slot)
            if kept and slot >= steps_before:
                rank = epoch.dealing.rank
                rows = [epoch.position(update, rank, number, row) for row in range(len(kept) + 1)]
                assert rows == [*kept, None]
            is_other = len(batch) == 1 < len(epochs) and not skipped & {*batch}
            assert batch == kept if kept else is_other


def test_a_batch_of_another_size():
    """A sampler of the user's that makes batches of other sizes has no places to compute."""
    rows = EpochRows(Dealing(6, 2, 1, 0, 3, range(3), fills_up=False), frozenset({1}))

    with pytest.raises(ValueError, match="got a batch of 3 rows instead of 2; use torch's"):
        list(rows.batches([[0, 1, 2], [3], [4, 5]]))


def test_a_position_outside():
    """The error says which positions an epoch has."""
    rows = EpochRows(Dealing(6, 2, 1, 0, 3, range(3), fills_up=False), frozenset({6}))

    with pytest.raises(ValueError, match=r"position 6 of epoch 2, .* 6 rows: positions 0 to 5"):
        rows.check(2)
