"""The weights of an average begin to be averaged when they require a gradient."""

import pytest
import torch
from torch import nn

from mfwrap.average.weights import AveragedWeights


def half_frozen():
    """Return a network whose first layer is frozen, and its averaged weights."""
    network = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
    network[0].requires_grad_(requires_grad=False)
    return network, AveragedWeights(network, 0.9, None, None)


def test_weights_start_in_the_order_of_their_module():
    """Their averages are copies of their present values, in one group with the others."""
    network, held = half_frozen()
    assert list(held.averages) == ["1.weight", "1.bias"]
    held.begin_update()
    assert list(held.averages) == ["1.weight", "1.bias"]

    network[0].bias.requires_grad_()
    held.begin_update()
    assert list(held.weights) == list(held.averages) == ["0.bias", "1.weight", "1.bias"]
    assert torch.equal(held.averages["0.bias"], network[0].bias)
    assert held.averages["0.bias"] is not network[0].bias
    [group] = held.groups
    assert len(group.averages) == 3


def test_started_with_says_what_start_will_do():
    """Unknown names and names of weights that are averaged already are ignored."""
    _, held = half_frozen()
    names = ["0.weight", "1.bias", "unknown"]
    expected = held.started_with(names)
    held.start(names)
    assert list(held.averages) == list(expected) == ["0.weight", "1.weight", "1.bias"]


def test_integers_and_what_a_list_holds_are_never_added():
    """Only floating-point parameters of a module may be averaged later."""
    network, _ = half_frozen()
    network.register_parameter("count", nn.Parameter(torch.ones(2).long(), requires_grad=False))
    held = AveragedWeights(network, 0.9, None, None)
    assert not held.any_of([network.count])
    assert held.any_of([network[0].bias])
    listed = AveragedWeights([network[1].bias], 0.9, None, None)
    assert not listed.any_of([network[0].bias])


def test_a_conversion_is_an_error_until_it_is_undone():
    """The error comes each time, also after new weights were to be averaged."""
    network, held = half_frozen()
    network.double()
    network[0].requires_grad_()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="`ema` must match the network's weights"):
            held.begin_update()
    network.float()
    held.begin_update()
    assert {average.dtype for average in held.averages.values()} == {torch.float32}
