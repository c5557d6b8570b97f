"""Random trainings of two ranks do what the contract says, update by update."""

import pytest
from hypothesis import given, settings

from support.random_training.cell import train_cells_on_rank
from support.random_training.checks import Observed, assert_as_expected
from support.random_training.draws import cases
from support.random_training.reference import expected_updates


def check(case, ranks):
    """Train a case on both ranks, and compare both with the reference."""
    expected = expected_updates(case)
    for rank, [updates] in enumerate(ranks.run(train_cells_on_rank, [case.plain()])):
        assert_as_expected(case, expected, [Observed(*update) for update in updates], rank)


@settings(max_examples=4)
@given(case=cases(num_ranks=2))
def test_each_update_is_the_contracts(case, two_ranks):
    """Random networks, settings, optimizers and faults of any rank agree with the reference."""
    check(case, two_ranks)


@pytest.mark.slow
@settings(max_examples=400)
@given(case=cases(num_ranks=2, max_updates=10))
def test_each_update_of_many_trainings_is_the_contracts(case, two_ranks):
    """Many longer random trainings of two ranks agree with the float64 reference."""
    check(case, two_ranks)
