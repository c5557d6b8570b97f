"""A forward pass that has run is differentiated instead of repeated, if nothing has changed."""

import copy
import pickle
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import SGD

from mfwrap import GradOperation, TrainOneStepCell, WithLossCell
from mfwrap.step.parts.forward_reuse import remember_forwards, take_output
from support.own_steps import GuidesStep


class Noisy(nn.Module):
    """Dropout and batch normalization; counts its forward passes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8, momentum=0.5), nn.Dropout(0.5), nn.Linear(8, 1)
        )
        self.passes = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        return self.layers(inputs)


def remembered() -> tuple[Noisy, list[nn.Parameter]]:
    """Return a network whose forward passes are remembered, and its weights."""
    network = Noisy()
    weights = list(network.parameters())
    remember_forwards(network, weights)
    return network, weights


def test_a_documented_step_runs_its_network_once():
    """With dropout and batch normalization, a documented step is bitwise equal to the cell."""
    torch.manual_seed(0)
    network = WithLossCell(Noisy(), nn.MSELoss())
    batch = torch.randn(16, 4), torch.randn(16, 1)
    results = []
    for kind in (TrainOneStepCell, GuidesStep):
        own = copy.deepcopy(network)
        cell = kind(own, SGD(own.parameters(), lr=0.1))
        torch.manual_seed(1)
        losses = [cell(*batch) for _ in range(3)]
        results.append((losses, own.state_dict(), torch.rand(())))
        assert own.backbone.passes == 3

    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


def test_a_pass_is_differentiated_once():
    """The activations are freed, so the next gradients take a new forward pass."""
    network, weights = remembered()
    gradients = GradOperation(get_by_list=True)(network, weights)
    inputs = torch.randn(8, 4)
    output = network(inputs)

    passes = []
    for _ in range(3):
        gradients(inputs)
        passes.append(network.passes)

    assert passes == [1, 2, 3]
    assert output.requires_grad


class Pass(NamedTuple):
    """A forward pass."""

    network: Noisy
    inputs: torch.Tensor
    output: torch.Tensor


CHANGES = {
    "nothing": lambda last: last,
    "weight": lambda last: last.network.layers[3].bias.add_(1),
    "output": lambda last: last.output.mul_(2),
    "input": lambda last: last.inputs.add_(1),
    "mode": lambda last: last.network.eval(),
    "pass without gradients": lambda last: last.network(last.inputs),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_makes_a_pass_obsolete(change):
    """After a change of weights, data, output or mode, the last pass is not used."""
    network, _ = remembered()
    inputs = torch.randn(8, 4)
    output = network(inputs)
    with torch.no_grad():
        CHANGES[change](Pass(network, inputs, output))

    assert take_output(network, [inputs]) is (output if change == "nothing" else None)


def test_other_inputs_and_a_lost_output_take_a_new_pass():
    """A pass is used only for its own inputs, and only while its output exists."""
    network, _ = remembered()
    inputs = torch.randn(8, 4)

    output = network(inputs)
    assert take_output(network, [inputs.clone()]) is None
    output = network(inputs)
    assert take_output(network, [inputs, inputs]) is None
    output = network(inputs=inputs)
    assert take_output(network, []) is None
    output, other = network(inputs), network(inputs.clone())
    assert take_output(network, [inputs]) is None
    output = network(inputs)
    del output, other
    assert take_output(network, [inputs]) is None
    assert take_output(Noisy(), [inputs]) is None


def test_nothing_is_kept_alive():
    """Neither the network nor an activation is kept alive, and both can be copied and pickled."""
    network, _ = remembered()
    inputs = torch.randn(8, 4)
    output = network(inputs)
    copied, loaded = copy.deepcopy(network), pickle.loads(pickle.dumps(network))  # noqa: S301  (our own)
    assert torch.equal(copied.eval()(inputs), loaded.eval()(inputs))
    assert take_output(copied, [inputs]) is None

    alive = [weakref.ref(network), weakref.ref(inputs), weakref.ref(output)]
    del network, inputs, output

    assert [each() for each in alive] == [None] * 3


@pytest.mark.slow
def test_a_network_compiled_in_place_runs_again():
    """The hook adds no graph break to a network that is compiled in place."""
    network, weights = remembered()
    network.eval()
    network.compile(fullgraph=True, backend="eager")
    inputs = torch.randn(8, 4)

    output = network(inputs)
    gradients = GradOperation(get_by_list=True)(network, weights)(inputs)

    expected = torch.autograd.grad(output.sum(), weights)
    torch.testing.assert_close(gradients, expected)
