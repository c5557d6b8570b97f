"""What modules receive and return is seen after other hooks, and what they have made before."""

import torch
from torch import nn

from mfwrap.callbacks.culprit.replay.module_calls import ModuleCalls


class Seen(ModuleCalls):
    """Note what is seen."""

    def __init__(self, network):
        self.values = []
        super().__init__(network.named_modules())

    def received(self, call, arguments):
        """Note the input."""
        self.values.append((*call.value("received"), arguments[0][0].item()))

    def made(self, call, inputs, output):
        """Note the output as the forward has made it."""
        self.values.append((*call.value("made"), output.item()))

    def returned(self, call, output):
        """Note the output as the caller gets it."""
        self.values.append((*call.value("returned"), output.item()))


def test_the_order_of_values():
    """Other hooks, registered before or after, change what is received and returned."""
    network = nn.Sequential(nn.Identity())
    network[0].register_forward_pre_hook(lambda _, inputs: (inputs[0] + 1,))
    network[0].register_forward_hook(lambda _, __, output: output * 10)
    with Seen(network) as seen:
        network(torch.ones(1))
        network(torch.ones(1))
    network(torch.ones(1))

    assert seen.values[:5] == [
        ("received", "", 0, 1.0),
        ("received", "0", 0, 2.0),
        ("made", "0", 0, 2.0),
        ("returned", "0", 0, 20.0),
        ("made", "", 0, 20.0),
    ]
    assert [each[2] for each in seen.values] == [0] * 6 + [1] * 6


def test_gradients_are_followed_until_the_end():
    """A gradient is seen before and after other hooks of its tensor; afterwards nothing is."""
    weight, found = torch.ones(1, requires_grad=True), []
    output = weight * 3
    calls = ModuleCalls([])
    calls.follow(output, lambda one: found.append(("first", one.item())))
    output.register_hook(lambda gradient: gradient * 5)
    calls.follow_made(output, lambda one: found.append(("last", one.item())))
    output.backward(retain_graph=True)
    calls.close()
    output.backward()

    assert found == [("first", 1.0), ("last", 5.0)]
