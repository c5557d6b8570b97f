"""Only forward passes in training mode, with gradients, and outside of replays train a network."""

import pytest
import torch
from torch import nn

from mfwrap.tensors.training_forwards import is_training_forward, replay


def test_what_trains():
    """A replay, also one that raises, ends with its block."""
    network = nn.Linear(1, 1)
    assert is_training_forward(network)
    with torch.no_grad():
        assert not is_training_forward(network)
    with replay():
        assert not is_training_forward(network)
        with replay():
            pass
        assert not is_training_forward(network)
    with pytest.raises(KeyError), replay():
        raise KeyError
    assert is_training_forward(network)
    assert not is_training_forward(network.eval())
