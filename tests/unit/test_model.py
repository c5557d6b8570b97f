"""`mfwrap.model` has the public names of MindSpore's training loop."""

import mfwrap
from mfwrap import model


def test_it_has_the_model_of_the_package():
    """`Model` is the same class under both of its public names."""
    assert model.Model is mfwrap.Model
