"""Random trainings with MFTrainer do what the contract says, update by update."""

import dataclasses
import math

import pytest
from hypothesis import given, settings

from support.random_training.checks import differences
from support.random_training.draws import cases
from support.random_training.loops import train_with_trainer
from support.random_training.reference import expected_updates


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder for runs that save nothing."""
    return tmp_path_factory.mktemp("runs")


def differences_of_trainer(case, folder):
    """Train a case with MFTrainer; return how it differs from the reference."""
    if case.max_norm is None:
        # The Trainer always reports the norm; an infinite limit means the same here.
        case = dataclasses.replace(case, max_norm=math.inf)
    return differences(case, expected_updates(case), train_with_trainer(case, folder))


@settings(max_examples=3)
@given(case=cases(per_token=False, max_updates=4))
def test_each_update_is_the_contracts(case, folder):
    """Random networks, settings, optimizers and faults agree with the float64 reference."""
    assert differences_of_trainer(case, folder) == []


@pytest.mark.slow
@settings(max_examples=300)
@given(case=cases(per_token=False, max_updates=10))
def test_each_update_of_many_trainings_is_the_contracts(case, folder):
    """Many longer random trainings agree with the float64 reference."""
    assert differences_of_trainer(case, folder) == []
