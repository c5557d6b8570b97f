"""The precision of a network is seen in its operations."""

import pytest
import torch
from torch import nn

from mfwrap.callbacks.culprit.replay.precision import computes_in_float16
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder


class Network(nn.Module):
    """A network that begins an autocast of its own, and draws random numbers."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 1), nn.Dropout(0.5)
        self.dtype = dtype

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return the loss, in float32."""
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype is not None):
            return self.linear(self.dropout(inputs)).float().square().mean()


@pytest.mark.parametrize("dtype", [None, torch.bfloat16, torch.float16])
def test_an_autocast_within_the_network(dtype):
    """Only float16 counts, and neither random numbers nor the recorded calls change."""
    network = Network(dtype)
    recorder = StepRecorder(network)
    network(torch.ones(2, 4))
    recorder.end_step()
    random = torch.get_rng_state()

    assert computes_in_float16(recorder) is (dtype == torch.float16)
    assert torch.equal(torch.get_rng_state(), random)
    assert len(recorder.last_step) == 1


def test_an_autocast_around_the_network():
    """The context of the recorded call counts."""
    network = nn.Linear(4, 1)
    recorder = StepRecorder(network)
    with torch.autocast("cpu", dtype=torch.float16):
        network(torch.ones(2, 4))
    recorder.end_step()

    assert computes_in_float16(recorder)


def test_a_call_that_fails():
    """The precision is unknown then, and without a call."""
    network = nn.Linear(4, 1).half()
    recorder = StepRecorder(network)
    assert not computes_in_float16(recorder)
    network(torch.ones(2, 4).half())
    recorder.end_step()
    network.weight = None
    assert not computes_in_float16(recorder)
