"""The finder that the settings of the training state monitor request."""

import pytest
import torch
from torch import nn
from transformers import TrainingArguments

from mfwrap.callbacks.training_state import TrainingStateSettings
from mfwrap.callbacks.training_state.culprit_finder import (
    _largest_gradient,
    is_compiled,
    new_finder,
)


def test_the_largest_gradient():
    """The largest gradient is 65504 in float16, and the root of the largest number in float32."""
    network = nn.Linear(2, 2)
    half = TrainingArguments(output_dir="unused", report_to=[])
    half.fp16 = True

    assert _largest_gradient(network, None) ** 2 == pytest.approx(3.4028235e38)
    assert _largest_gradient(network, half) == torch.finfo(torch.float16).max
    assert _largest_gradient(nn.Linear(2, 2).half(), None) == torch.finfo(torch.float16).max
    assert _largest_gradient(None, None) == torch.finfo(torch.float16).max


def test_a_replay_of_a_compiled_network_is_refused_with_a_warning(caplog):
    """Hooks would force a recompilation; everything else is judged."""
    network = nn.Linear(2, 2)
    compiled = nn.Sequential(network)
    compiled._orig_mod = network  # as `torch.compile` wraps a network
    settings = TrainingStateSettings(replay=True)

    assert (is_compiled(network, None), is_compiled(compiled, None)) == (False, True)
    assert new_finder(settings, None, network, 0).recorder is not None
    assert new_finder(settings, None, compiled, 0).recorder is None
    assert "cannot replay steps of a network that is compiled" in caplog.text
