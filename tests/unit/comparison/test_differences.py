"""The gradient where a difference began is named only if the records show it."""

import pytest

from mfwrap.comparison.differences import (
    CAUSES,
    RESULTS,
    Difference,
    difference_of,
    first_in_backward,
)


@pytest.mark.parametrize(
    ("names", "num_compared", "can_name", "expected"),
    [
        (["b"], 3, False, "b"),
        (["a", "b"], 3, True, "b"),
        (["a", "b"], 3, False, None),
        (["a", "b", "c"], 3, True, None),
    ],
)
def test_first_in_backward(names, num_compared, can_name, expected):
    """One gradient is always named, several by the order of backward, all of them never."""
    assert first_in_backward(names, num_compared, can_name=can_name) == expected


@pytest.mark.parametrize(
    ("differing", "ranks", "num_differing"),
    [
        ([("a", 2), ("b", 1), ("b", 2)], (1, 2), 2),
        ([("b", 1), ("b", 0), ("b", 2)], (), 1),
    ],
)
def test_ranks_and_counts(differing, ranks, num_differing):
    """Ranks are named only if others were compared and are equal."""
    compared = [(name, rank) for name in "abc" for rank in range(3)]
    found = difference_of(4, "weight", differing, compared, name="b")

    assert found == Difference(
        step=4,
        kind="weight",
        name="b",
        ranks=ranks,
        num_differing=num_differing,
        num_compared=3,
    )


def test_kinds():
    """Each kind is a cause or a result."""
    assert not set(CAUSES) & set(RESULTS)
    assert RESULTS[0] == "loss"
