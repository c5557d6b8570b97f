"""The batch grows by MindFormers' formula, or by a table."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.schedules import BatchGrowth

MANY = 400


def sizes_of(start, increment, samples, global_batch_size):
    """Return the sizes of the first updates by MindFormers' formula, one after the other."""
    levels = (global_batch_size - start) // increment
    sizes, consumed = [], 0
    for _ in range(MANY):
        size = global_batch_size
        if consumed <= samples and samples and levels:
            level = int(consumed / (samples / levels))
            size = min(start + increment * level, global_batch_size)
        sizes.append(size)
        consumed += size
    return sizes


@st.composite
def growths(draw):
    """Return the three numbers, and a global batch that they grow to."""
    start, increment = draw(st.integers(1, 40)), draw(st.integers(1, 9))
    return (
        start,
        increment,
        draw(st.integers(0, 2000)),
        start + increment * draw(st.integers(0, 12)),
    )


@given(growths(), st.integers(0, MANY // 2), st.integers(0, 150))
def test_sizes_are_those_of_mindformers(numbers, first, samples):
    """Each size, their sums, and the number of updates that take so many samples."""
    *given_numbers, global_batch_size = numbers
    growth, sizes = BatchGrowth(given_numbers, global_batch_size), sizes_of(*numbers)
    sums = [0, *itertools.accumulate(sizes)]
    enough = next(n for n in range(MANY - first) if sums[first + n] - sums[first] >= samples)

    assert [growth.size(update) for update in range(MANY)] == sizes
    assert [growth.samples(number) for number in range(MANY)] == sums[:-1]
    assert growth.num_updates(first, samples) == enough
    reached = sorted({*sizes})  # some need more updates for all
    assert list(growth.sizes)[: len(reached)] == reached


def test_the_example_that_mindformers_ran():
    """Recorded from its scheduler: 4, 2, 2 and 2 updates, and the global batch from step 11 on."""
    growth = BatchGrowth([16, 4, 200], 32)

    sizes = [growth.size(update) for update in range(12)]
    assert sizes == [16] * 4 + [20] * 2 + [24] * 2 + [28] * 2 + [32] * 2
    assert growth.samples(10) == 208


def test_a_long_growth_is_not_walked_step_by_step():
    """A thousand levels of a million updates each."""
    growth = BatchGrowth([1, 1, 10**12], 1000)

    assert growth.size(10**15) == growth.sizes[-1] == 1000
    # The first level ends with the first update that begins after 10**12 / 999 samples.
    assert (growth.size(1_001_001_001), growth.size(1_001_001_002)) == (1, 2)


def test_a_table_says_from_which_update_on_a_size_holds():
    """Updates count from 0."""
    growth = BatchGrowth({0: 16, 3: 24, 5: 32}, 32)

    assert [growth.size(update) for update in range(7)] == [16, 16, 16, 24, 24, 32, 32]
    assert growth.samples(6) == 3 * 16 + 2 * 24 + 32


@pytest.mark.parametrize(
    ("growth", "says"),
    [
        ([16, 4], r"must be \[start, increment, samples\] with .*, got \[16, 4\]"),
        ([0, 4, 200], r"with a start and an increment >= 1 .*, got \[0, 4, 200\]"),
        ([16, 0, 200], r"with a start and an increment >= 1 .*, got \[16, 0, 200\]"),
        ([16, 4, -1], r"and samples >= 0, got \[16, 4, -1\]"),
        ([16, 5, 200], "in steps of 5 to the global batch, 32 rows, got 16 rows between them"),
        ([36, 4, 200], "from 36 in steps of 4 to the global batch, 32 rows, got -4 rows"),
        ({}, r"rising updates from 0 on, with rising sizes from 1 on, got \{\}"),
        ({1: 16, 2: 32}, "rising updates from 0 on"),
        ({0: 16, 5: 24, 3: 32}, "rising updates from 0 on"),
        ({0: 16, 3: 16, 4: 32}, "with rising sizes"),
        ({0: 0, 3: 32}, "with rising sizes from 1 on"),
        ({-1: 16, 3: 32}, "rising updates from 0 on"),
        ({0: 16, 3: 24}, "must end with the global batch, 32 rows, got 24"),
    ],
)
def test_growths_that_do_not_lead_to_the_global_batch(growth, says):
    """The error names the argument and the value."""
    with pytest.raises(ValueError, match=says):
        BatchGrowth(growth, 32)


@pytest.mark.parametrize("growth", [16, "16", [16, 4.0, 200], [True, 4, 200], {0: "16"}, None])
def test_values_of_another_type(growth):
    """Three ints or a table of ints are expected."""
    with pytest.raises(TypeError, match="`rampup_batch_size"):
        BatchGrowth(growth, 32)


def test_sizes_that_ranks_and_micro_batches_do_not_divide():
    """Each level is checked, not only the first and the last one."""
    growth = BatchGrowth([16, 4, 200], 32)

    growth.check_divisible(4)
    with pytest.raises(ValueError, match=r"a multiple of 8, the rows of a micro-batch.*got 20"):
        growth.check_divisible(8)
