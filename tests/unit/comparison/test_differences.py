"""The gradient where a difference began is named only if the records show it."""

import pytest

from mfwrap.comparison.differences import CAUSES, RESULTS, differing_ranks, first_in_backward


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


def test_ranks():
    """Ranks are named only if others were compared and are equal."""
    assert differing_ranks([2, 1, 1], [0, 1, 2]) == (1, 2)
    assert differing_ranks([1, 0], [0, 1]) == ()


def test_kinds():
    """Each kind is a cause or a result."""
    assert not set(CAUSES) & set(RESULTS)
    assert RESULTS[0] == "loss"
