"""The global batch size of each update of a training whose batch grows."""

import itertools
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, final

from mfwrap.arguments import check_int, described

RampUp = Sequence[int] | Mapping[int, int]
"""``[start, increment, samples]``, or a table of batch sizes by the update from which they hold."""

_NAME = "rampup_batch_size"


class _Level(NamedTuple):
    first: int
    """Number of updates before the level."""

    size: int
    """Samples of an update."""

    samples: int
    """Samples of all updates before the level."""


@final
class BatchGrowth:
    """Say how many samples each update has while the batch grows to the global batch.

    The growth depends on the number of updates alone, so a training that resumes continues it.

    - ``[start, increment, samples]``, as in MindFormers: the first update has `start` samples. From
      there to the global batch it is ``n = (global_batch_size - start) / increment`` levels. After
      ``c`` samples, an update has ``start + increment * int(c / (samples / n))`` samples, at most
      the global batch, and the global batch if ``c > samples``.
    - A table ``{0: 16, 100: 32}``: updates have 16 samples, and from update 100 on, counted from 0,
      32. The first key is 0, and the last size is the global batch.

    Source: MindFormers, ``training.rampup_batch_size``; the table is mfwrap's own.

    Example:
        >>> growth = BatchGrowth([16, 4, 200], global_batch_size=32)
        >>> [growth.size(update) for update in range(11)]
        [16, 16, 16, 16, 20, 20, 24, 24, 28, 28, 32]

    Args:
        rampup_batch_size: Three numbers, or a table. All sizes count the samples of an update on
            all ranks together.
        global_batch_size: Samples of an update when the batch has grown.

    Raises:
        TypeError: If `rampup_batch_size` is neither a sequence nor a mapping, or an entry is not an
            int.
        ValueError: If the sizes do not grow to the global batch.
    """

    def __init__(self, rampup_batch_size: RampUp, global_batch_size: int) -> None:
        check_ramp_up(rampup_batch_size)
        self._global = check_int("global_batch_size", global_batch_size)
        if isinstance(rampup_batch_size, Mapping):
            self._check_table(rampup_batch_size)
            sizes = [*rampup_batch_size.items()]
        else:
            self._check_numbers(*rampup_batch_size)
            sizes = [*self._grown(*rampup_batch_size)]
        levels = [_Level(0, sizes[0][1], 0)]
        for first, size in sizes[1:]:
            before = levels[-1]
            samples = before.samples + (first - before.first) * before.size
            levels.append(_Level(first, size, samples))
        self._levels = levels
        self._firsts = [level.first for level in levels]

    @property
    def sizes(self) -> tuple[int, ...]:
        """Samples of an update, at each level."""
        return tuple(level.size for level in self._levels)

    def size(self, update: int) -> int:
        """Return the samples of an update.

        Args:
            update: Number of updates before it.
        """
        return self._level(update).size

    def samples(self, num_updates: int) -> int:
        """Return the samples of the first `num_updates` updates together."""
        level = self._level(num_updates)
        return level.samples + (num_updates - level.first) * level.size

    def num_updates(self, first: int, samples: int) -> int:
        """Return how many updates take so many samples; the last one may lack some.

        Args:
            first: Number of updates before them.
            samples: Number of samples, >= 0.
        """
        target = self.samples(first) + samples
        return bisect_left(range(first, first + samples), target, key=self.samples)

    def check_divisible(self, rows: int) -> None:
        """Check that each size is a number of whole micro-batches on all ranks.

        Args:
            rows: Rows of a micro-batch on all ranks together.

        Raises:
            ValueError: If a size is not.
        """
        check_multiples(self.sizes, rows)

    def _level(self, update: int) -> _Level:
        return self._levels[bisect_right(self._firsts, update) - 1]

    def _grown(self, start: int, increment: int, samples: int) -> Iterator[tuple[int, int]]:
        """Yield the levels of MindFormers' rule: the first update, and the size."""
        num_levels = (self._global - start) // increment

        def size_after(consumed: int) -> int:
            # In MindFormers' order of operations, which rounds the quotients.
            if consumed > samples or not samples or not num_levels:
                return self._global
            grown = start + increment * int(consumed / (samples / num_levels))
            return min(grown, self._global)

        update = consumed = 0
        while True:
            size = size_after(consumed)
            yield update, size
            if size == self._global:
                return
            # The size never falls, so the first update of the next level can be bisected.
            until_end = range(consumed, samples + 2 * size, size)
            number = bisect_right(until_end, size, key=size_after)
            update, consumed = update + number, consumed + number * size

    def _check_numbers(self, start: int, increment: int, _: int) -> None:
        if start > self._global or (self._global - start) % increment:
            msg = (
                f"`{_NAME}` must grow from {start} in steps of {increment} to the global batch, "
                f"{self._global} rows, got {self._global - start} rows between them"
            )
            raise ValueError(msg)

    def _check_table(self, table: Mapping[int, int]) -> None:
        last = [*table.values()][-1]
        if last != self._global:
            msg = f"`{_NAME}` must end with the global batch, {self._global} rows, got {last}"
            raise ValueError(msg)


def check_ramp_up(value: object) -> None:
    """Check all of an argument `rampup_batch_size` that does not depend on the global batch.

    Raises:
        TypeError: If it is neither a sequence nor a mapping, or an entry is not an int.
        ValueError: If there are not three numbers, a table does not begin at update 0, or a number
            is too small.
    """
    if isinstance(value, str) or not isinstance(value, Sequence | Mapping):
        msg = (
            f"`{_NAME}` must be [start, increment, samples] or a table of sizes by updates, got "
            f"{described(value)}"
        )
        raise TypeError(msg)
    is_table = isinstance(value, Mapping)
    numbers = [*value, *value.values()] if isinstance(value, Mapping) else [*value]
    for number in numbers:
        if isinstance(number, bool) or not isinstance(number, int):
            msg = f"`{_NAME}` must hold ints, got {described(number)}"
            raise TypeError(msg)
    if is_table and not _is_growing(numbers[: len(value)], numbers[len(value) :]):
        msg = (
            f"`{_NAME}` must have rising updates from 0 on, with rising sizes from 1 on, got "
            f"{value}"
        )
        raise ValueError(msg)
    if not is_table and (len(numbers) != 3 or min(*numbers[:2], numbers[2] + 1) < 1):
        msg = (
            f"`{_NAME}` must be [start, increment, samples] with a start and an increment >= 1 and "
            f"samples >= 0, got {value}"
        )
        raise ValueError(msg)


def _is_growing(updates: Sequence[int], sizes: Sequence[int]) -> bool:
    pairs = (*itertools.pairwise(updates), *itertools.pairwise(sizes))
    return updates[:1] == [0] and sizes[0] >= 1 and all(a < b for a, b in pairs)


def check_multiples(sizes: Sequence[int], rows: int) -> None:
    """Check that sizes of updates are multiples of the rows of a micro-batch.

    Args:
        sizes: Sizes of updates.
        rows: Rows of a micro-batch on all ranks together.

    Raises:
        ValueError: If a size is not.
    """
    wrong = next((size for size in sizes if size % rows), None)
    if wrong is not None:
        msg = (
            f"each size of `{_NAME}` must be a multiple of {rows}, the rows of a micro-batch on "
            f"all ranks, got {wrong}"
        )
        raise ValueError(msg)
