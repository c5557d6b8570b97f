"""Where a finite step first differs from the step before is found by running both again."""

import math

import pytest
import torch
from torch import nn

from mfwrap.callbacks.culprit.replay.difference import first_difference
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder


class Network(nn.Module):
    """Three layers with a LayerNorm; returns the loss. A step is odd if `is_odd` was given."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.norm, self.last = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1)
        self.is_odd = False
        self.fails = False

    def forward(self, inputs, *, is_odd=False):
        """Return the mean squared error of the sum of the inputs."""
        self.is_odd = is_odd
        if self.fails:
            raise ValueError
        outputs = self.last(self.norm(self.first(inputs)).tanh())
        return (outputs.squeeze(1) - inputs[:, 0]).square().mean()


def changed(network, factor, of):
    """Return a hook that multiplies by a factor in an odd step: an output, or its gradient."""

    def change(_module, _inputs, output):
        if not network.is_odd:
            return None
        if of == "output":
            return output * factor
        output.register_hook(lambda gradient: gradient * factor)
        return None

    return change


def found(network, *, size=1.0, num_micro_batches=2):
    """Return what is found after an ordinary and an odd step; None as often as it is called."""
    recorder = StepRecorder(network)
    generator = torch.Generator().manual_seed(1)
    for is_odd in (False, True):
        for number in range(num_micro_batches):
            inputs = torch.randn(16, 8, generator=generator)
            last_is_odd = is_odd and number == num_micro_batches - 1
            factor = size if last_is_odd else 1.0
            network(inputs * factor, is_odd=last_is_odd).backward()
        recorder.end_step()
    return first_difference(recorder)


def test_two_ordinary_steps():
    """Batches differ by less than the limits."""
    assert found(Network()) is None


@pytest.mark.parametrize("factor", [20.0, 0.05, 0.0])
def test_the_output_of_a_module(factor):
    """The first module is named whose output differs and whose input does not."""
    network = Network()
    network.first.register_forward_hook(changed(network, factor, "output"))

    difference = found(network)

    assert difference[:2] == ("activation", "first")
    assert difference.ratio == pytest.approx(factor, rel=0.3)


@pytest.mark.parametrize("place", ["first", "norm"])
def test_the_gradient_behind_a_module(place):
    """The order is that of the backward."""
    network = Network()
    network.get_submodule(place).register_forward_hook(changed(network, 100.0, "gradient"))

    difference = found(network)
    assert difference[:2] == ("gradient", place)
    assert difference.by_hook
    assert difference.ratio == pytest.approx(99, rel=1e-3)


def test_a_hook_on_what_a_module_receives():
    """It is one on what another module has returned."""
    network = Network()

    def change(_module, inputs):
        inputs[0].register_hook(lambda one: one * (100.0 if network.is_odd else 1.0))

    network.norm.register_forward_pre_hook(change)
    difference = found(network)
    assert difference[:2] == ("gradient", "first")
    assert difference.by_hook


class Backward(torch.autograd.Function):
    """Returns its input, and multiplies its gradient."""

    @staticmethod
    def forward(context, one, factor):
        """Return the input."""
        context.factor = factor
        return one.clone()

    @staticmethod
    def backward(context, gradient):
        """Return the multiplied gradient."""
        return gradient * context.factor, None


def test_the_backward_of_a_module():
    """Without a hook, the gradients of what it has received and returned are compared."""
    network = Network()
    inner = network.norm.forward
    network.norm.forward = lambda one: inner(Backward.apply(one, 100.0 if network.is_odd else 1.0))

    difference = found(network)
    assert difference[:2] == ("gradient", "norm")
    assert not difference.by_hook


@pytest.mark.parametrize(
    ("places", "is_always"),
    [(("first",), False), (("first", "last"), False), (("first", "last"), True)],
)
def test_hooks_on_weights(places, is_always):
    """They are seen whatever the sizes of the gradients; what they always do is no difference."""
    network = Network()
    for place in places:
        network.get_submodule(place).weight.register_hook(
            lambda one: one + one.roll(1, 1) if network.is_odd or is_always else one
        )
    difference = found(network)
    if is_always:
        assert difference is None
        return
    names = {difference.name, *difference.others}
    assert names == {f"{place}.weight" for place in places}
    assert difference.by_hook


def test_a_hook_on_a_weight_that_is_no_linear_layers():
    """The size of its gradient tells."""
    network = Network()
    network.norm.weight.register_hook(lambda one: one * (100.0 if network.is_odd else 1.0))

    difference = found(network)
    assert difference[:2] == ("gradient", "norm.weight")
    assert not difference.by_hook


def test_hooks_on_all_weights():
    """Those of other layers than linear ones count by the size of their gradients."""
    network = Network()
    for weight in network.parameters():
        weight.register_hook(lambda one: one * (100.0 if network.is_odd else 1.0))

    difference = found(network)
    assert {"norm.weight", "norm.bias", "last.bias"} < {difference.name, *difference.others}


@pytest.mark.parametrize(("factor", "is_found"), [(3.5, False), (8.0, True)])
def test_a_factor_near_the_limit(factor, is_found):
    """Where a first gradient is nearly odd, a later one that is odd was not made there alone."""
    network = Network()
    network.register_forward_hook(changed(network, 5.0, "output"))
    inner = network.norm.forward
    network.norm.forward = lambda one: inner(Backward.apply(one, factor if network.is_odd else 1.0))
    difference = found(network)
    assert (difference is not None) is is_found


def test_tied_weights():
    """The gradient of a weight that two modules use is that of both."""
    network = Network()
    network.norm = nn.Linear(8, 8)
    network.norm.weight = network.first.weight
    assert found(network) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision(dtype):
    """Rounding is no change."""
    network = Network()
    inner = network.forward

    def forward(*inputs, **keywords):
        with torch.autocast("cpu", dtype=dtype):
            return inner(*inputs, **keywords)

    network.forward = forward
    assert found(network) is None


def test_an_input():
    """What follows from it is not named."""
    assert found(Network(), size=50.0)[:2] == ("input", "inputs")


def test_a_factor_in_the_loss():
    """Then all gradients differ, the first one as well."""
    network = Network()
    network.register_forward_hook(changed(network, 1000.0, "output"))

    assert found(network) is None


def test_a_factor_in_the_loss_of_a_module():
    """A wrapper around a network that returns its own loss changes nothing."""

    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Network()

        def forward(self, inputs, *, is_odd=False):
            return self.body(inputs, is_odd=is_odd)

    network = Wrapper()
    inner = network.body.forward
    network.body.forward = lambda *inputs, is_odd: inner(*inputs) * (1000.0 if is_odd else 1.0)

    assert found(network) is None


def test_masks_do_not_differ():
    """An infinite value is compared with nothing."""
    network = Network()
    network.first.register_forward_hook(
        lambda _module, _inputs, output: output.masked_fill(torch.eye(8)[0].bool(), -math.inf)
    )
    network.norm.register_forward_pre_hook(lambda _, inputs: inputs[0].nan_to_num(neginf=0.0))

    assert found(network) is None


def test_a_step_that_cannot_be_run_again():
    """An error of the network is no finding."""
    network = Network()
    recorder = StepRecorder(network)
    for _ in range(2):
        network(torch.randn(4, 8)).backward()
        recorder.end_step()
    network.fails = True

    assert first_difference(recorder) is None


def test_nothing_is_left_behind():
    """Gradients and hooks are as before."""
    network = Network()
    hooks = [len(module._forward_hooks) for module in network.modules()]
    network.zero_grad()
    found(network)
    gradients = [weight.grad.clone() for weight in network.parameters()]
    recorder_free = [len(module._forward_hooks) for module in network.modules()]

    assert recorder_free[1:] == hooks[1:]
    assert all(
        torch.equal(one, weight.grad)
        for one, weight in zip(gradients, network.parameters(), strict=True)
    )


def test_a_gradient_that_vanishes_by_the_inputs():
    """The attention to equal tokens has no gradient for queries and keys: nothing is at fault."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(32, 8)
            self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
            self.head = nn.Linear(8, 32)

        def forward(self, tokens):
            rows = self.embed(tokens)
            attended = nn.functional.scaled_dot_product_attention(
                self.query(rows), self.key(rows), self.value(rows)
            )
            return nn.functional.cross_entropy(self.head(attended).flatten(0, 1), tokens.flatten())

    network = Attending()
    recorder = StepRecorder(network)
    for tokens in (torch.randint(32, (4, 10)), torch.full((4, 10), 3)):
        network(tokens).backward()
        recorder.end_step()

    assert first_difference(recorder) is None
