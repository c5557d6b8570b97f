"""Two optimizers of one network share a dynamic loss scale."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

from mfwrap.accelerate import attach
from support.accelerate_loops import new_accelerator
from support.small_networks import Classifier, labelled_batches
from support.spoilt.training import BadElement

INF = math.inf
NUM_UPDATES = 12


def grad_scaler() -> torch.amp.GradScaler:
    """Return a gradient scaler whose scale grows after three applied updates in a row."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=3)


def pair_of(*, fused: bool):
    """Return a network, and for each layer an optimizer and an element to corrupt."""
    torch.manual_seed(0)
    network = Classifier()
    layers = [network.layers[0], network.layers[2]]
    return (
        network,
        [SGD(layer.parameters(), lr=0.05, momentum=0.9, fused=fused) for layer in layers],
        [BadElement(layer.weight, INF) for layer in layers],
    )


def train_pair_plainly(bad: tuple[set[int], set[int]], *, fused: bool):
    """Train as in torch's documentation, with one scaler that is updated after both steps."""
    network, optimizers, bad_elements = pair_of(fused=fused)
    scaler = grad_scaler()
    scales = []
    for index, batch in enumerate(labelled_batches(NUM_UPDATES)):
        for element, updates in zip(bad_elements, bad, strict=True):
            element.active = index in updates
        scaler.scale(network(*batch)).backward()
        for each in optimizers:
            scaler.step(each)
        scaler.update()
        network.zero_grad()
        scales.append(scaler.get_scale())
    return scales, [weight.detach() for weight in network.parameters()]


def zero_network(network: nn.Module, optimizers: list[Any]) -> None:
    """Zero gradients with the network's default, as in torch's tutorials."""
    network.zero_grad()


def zero_network_in_place(network: nn.Module, optimizers: list[Any]) -> None:
    """Zero the network's gradients in place, as was torch's old default."""
    network.zero_grad(set_to_none=False)


def zero_optimizers(network: nn.Module, optimizers: list[Any]) -> None:
    """Zero gradients with each optimizer, as in accelerate's documentation."""
    for optimizer in optimizers:
        optimizer.zero_grad()


def zero_optimizers_in_place(network: nn.Module, optimizers: list[Any]) -> None:
    """Zero gradients with each optimizer and keep the gradient tensors."""
    for optimizer in optimizers:
        optimizer.zero_grad(set_to_none=False)


ZEROING = {
    "by the network": zero_network,
    "by the network, in place": zero_network_in_place,
    "by the optimizers": zero_optimizers,
    "by the optimizers, in place": zero_optimizers_in_place,
}

BAD = {
    "none": (set(), set()),
    "the first": ({1, 6}, set()),
    "the second": (set(), {1, 6}),
    # Update 0 is never bad: if it is skipped, torch's fused SGD leaves its momentum uninitialized.
    "both": ({1, 5, 6}, {1, 5, 6}),
    "in turn": ({1, 8}, {2, 9}),
}


@pytest.mark.fast_sample(16)
@pytest.mark.parametrize("zeroed_first", [False, True], ids=["zeroed last", "zeroed first"])
@pytest.mark.parametrize("zero", ZEROING.values(), ids=ZEROING)
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
def test_the_scale_changes_once_for_both_and_not_between_them(fused, bad, zero, zeroed_first):
    """Scales and weights equal those of one scaler that is updated after both optimizers step.

    The second optimizer's gradients are divided by the scale that they were computed with, even if
    the first optimizer's gradients overflowed.
    """
    expected_scales, expected = train_pair_plainly(bad, fused=fused)
    accelerator = new_accelerator()
    accelerator.scaler = grad_scaler()
    step = attach(accelerator)
    network, optimizers, bad_elements = pair_of(fused=fused)
    network, *optimizers = accelerator.prepare(network, *optimizers)

    scales, skipped = [], []
    for index, batch in enumerate(labelled_batches(NUM_UPDATES)):
        for element, updates in zip(bad_elements, bad, strict=True):
            element.active = index in updates
        if zeroed_first:
            zero(network, optimizers)
        accelerator.backward(network(*batch))
        for each in optimizers:
            each.step()
        if not zeroed_first:
            zero(network, optimizers)
        scales.append(step.loss_scale.item())
        skipped.append([each.step_was_skipped for each in optimizers])

    assert skipped == [[index in updates for updates in bad] for index in range(NUM_UPDATES)]
    assert scales == expected_scales
    for theirs, ours in zip(expected, network.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_accelerate_alone_divides_by_a_scale_that_has_moved():
    """Without the step, accelerate changes the scale between two optimizers and doubles an update.

    An overflow in the first layer halves the scale. The second layer's gradients, which were
    computed with the old scale, are then divided by the halved scale.
    """
    bad = ({0}, set())
    network, optimizers, bad_elements = pair_of(fused=False)
    before = network.layers[2].weight.detach().clone()
    accelerator = new_accelerator("fp16", scale=2.0**10)
    accelerator.native_amp = False
    network, *optimizers = accelerator.prepare(network, *optimizers)
    batch = labelled_batches(1)[0]

    bad_elements[0].active = 0 in bad[0]
    accelerator.backward(network(*batch))
    gradient = network.layers[2].weight.grad / 2.0**10
    for each in optimizers:
        each.step()

    moved = network.layers[2].weight.detach() - before
    torch.testing.assert_close(moved, -0.05 * 2 * gradient, rtol=1e-4, atol=1e-7)


class TwoWeights(nn.Module):
    """A network that returns ``sum(first * inputs) + sum(second * inputs)``."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.ones(2))
        self.second = nn.Parameter(torch.ones(2))

    def forward(self, inputs: Tensor) -> Tensor:
        return (self.first * inputs).sum() + (self.second * inputs).sum()


def two_weights(*, fused: bool):
    """Return a `TwoWeights` network and an optimizer for each weight."""
    network = TwoWeights()
    return network, *(SGD([weight], lr=0.05, fused=fused) for weight in network.parameters())


def renew_gradient(weight: nn.Parameter) -> None:
    """Replace a gradient with zeros, in an object with the same id if possible."""
    if weight.grad is not None:
        old = id(weight.grad)
        weight.grad = None
        others = []
        while len(others) < 10_000:
            others.append(torch.zeros(2))
            if id(others[-1]) == old:
                weight.grad = others.pop()
                return
    weight.grad = torch.zeros(2)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "not fused"])
def test_gradients_are_new_though_they_lie_where_the_last_ones_lay(fused):
    """New gradients are recognized even if they reuse the Python ids of the previous gradients.

    The scale changes at every update: it grows after an applied update and falls after an overflow.
    """
    settings = {"init_scale": 2.0**10, "growth_interval": 1}
    batches = [torch.full((2,), value) for value in (1.0, INF) * 10]
    scaler = torch.amp.GradScaler("cpu", **settings)
    network, *optimizers = two_weights(fused=fused)
    expected_scales = []
    for inputs in batches:
        network.zero_grad()
        scaler.scale(network(inputs)).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        expected_scales.append(scaler.get_scale())
    expected = [weight.detach() for weight in network.parameters()]

    accelerator = new_accelerator()
    accelerator.scaler = torch.amp.GradScaler("cpu", **settings)
    step = attach(accelerator)
    network, *optimizers = accelerator.prepare(*two_weights(fused=fused))
    scales = []
    for inputs in batches:
        for weight in network.parameters():
            renew_gradient(weight)
        accelerator.backward(network(inputs))
        for optimizer in optimizers:
            optimizer.step()
        scales.append(step.loss_scale.item())

    assert scales == expected_scales
    weights = [weight.detach() for weight in network.parameters()]
    torch.testing.assert_close(weights, expected, rtol=0, atol=0)
