"""Attributes are set within a block only."""

from types import SimpleNamespace

import pytest

from mfwrap.accelerate.attributes import replaced


def test_attributes_are_restored_after_an_error():
    """Each attribute has its new value within the block, and its own again after an error."""
    target = SimpleNamespace(steps=4, naming=True)

    with pytest.raises(ZeroDivisionError), replaced(target, steps=0, naming=False):
        assert 4 / target.steps

    assert vars(target) == {"steps": 4, "naming": True}
