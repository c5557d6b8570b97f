"""Random trainings of the cell do what the contract says, update by update."""

import pytest
from hypothesis import given, settings

from support.random_training.cell import train_cell
from support.random_training.checks import differences
from support.random_training.draws import cases
from support.random_training.reference import expected_updates


@settings(max_examples=8)
@given(case=cases())
def test_each_update_is_the_contracts(case):
    """Random networks, settings, optimizers and faults agree with the float64 reference."""
    assert differences(case, expected_updates(case), train_cell(case)) == []


@pytest.mark.slow
@settings(max_examples=1500)
@given(case=cases(max_updates=12))
def test_each_update_of_many_trainings_is_the_contracts(case):
    """Many longer random trainings agree with the float64 reference."""
    assert differences(case, expected_updates(case), train_cell(case)) == []
