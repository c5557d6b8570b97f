"""Random trainings of two ranks do what the contract says, update by update."""

import pytest
from hypothesis import given, settings

from support.random_training.cell import train_cells_on_rank
from support.random_training.checks import Observed, differences
from support.random_training.draws import cases
from support.random_training.reference import expected_updates


def differences_of_ranks(case, ranks):
    """Train a case on both ranks; return how each rank differs from the reference."""
    expected = expected_updates(case)
    return [
        differences(case, expected, [Observed(*update) for update in updates], rank)
        for rank, [updates] in enumerate(ranks.run(train_cells_on_rank, [case.plain()]))
    ]


@settings(max_examples=4)
@given(case=cases(num_ranks=2))
def test_each_update_is_the_contracts(case, two_ranks):
    """Random networks, settings, optimizers and faults of any rank agree with the reference."""
    assert differences_of_ranks(case, two_ranks) == [[], []]


@pytest.mark.slow
@settings(max_examples=400)
@given(case=cases(num_ranks=2, max_updates=10))
def test_each_update_of_many_trainings_is_the_contracts(case, two_ranks):
    """Many longer random trainings of two ranks agree with the float64 reference."""
    assert differences_of_ranks(case, two_ranks) == [[], []]
