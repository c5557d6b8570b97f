"""Random trainings in an attached loop do what the contract says, update by update."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.random_training.checks import differences
from support.random_training.draws import cases
from support.random_training.loops import train_attached
from support.random_training.reference import expected_updates


@settings(max_examples=6)
@given(case=cases(per_token=False), loop_clips=st.booleans())
def test_each_update_is_the_contracts(case, loop_clips):
    """Random networks, settings, optimizers and faults agree with the float64 reference."""
    updates = train_attached(case, loop_clips=loop_clips)

    assert differences(case, expected_updates(case), updates) == []


@pytest.mark.slow
@settings(max_examples=800)
@given(case=cases(per_token=False, max_updates=12), loop_clips=st.booleans())
def test_each_update_of_many_trainings_is_the_contracts(case, loop_clips):
    """Many longer random trainings agree with the float64 reference."""
    updates = train_attached(case, loop_clips=loop_clips)

    assert differences(case, expected_updates(case), updates) == []
