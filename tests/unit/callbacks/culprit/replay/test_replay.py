"""A replay finds where the first non-finite value arises, and changes nothing."""

import math
import re

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from mfwrap.callbacks.culprit.replay.recorder import StepRecorder
from mfwrap.callbacks.culprit.replay.replay import Origin, replay_step, unscaled_norm

NAN, INF = math.nan, math.inf


class Network(nn.Module):
    """Two layers with dropout and running statistics; with targets it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.drop = nn.Dropout(0.5)
        self.last = nn.Linear(4, 1)
        self.outputs: list[torch.Tensor] = []

    def forward(self, inputs, targets=None, **others):
        """Return a dict with the loss and the outputs; without targets, the outputs alone."""
        self.others = others
        outputs = self.last(self.drop(self.norm(self.first(inputs)))).squeeze(1)
        self.outputs.append(outputs.detach())
        if targets is None:
            return outputs
        return {"loss": (outputs - targets).square().mean(), "outputs": outputs}


def recorded(*calls, network=None):
    """Return the recorder of a step with these calls: pairs of positional and keyword arguments."""
    network = Network() if network is None else network
    recorder = StepRecorder(network)
    for positional, keywords in calls:
        network(*positional, **keywords)
    recorder.end_step()
    return recorder


def call(rows=3, **keywords):
    """Return the arguments of a call in which all values are finite."""
    return (torch.randn(rows, 4), torch.randn(rows)), keywords


def test_a_step_in_order():
    """A replay of a good step finds nothing."""
    assert replay_step(recorded(call(), call(rows=5)), 2.0**16) is None


class Padded(Network):
    """A network whose module `drop` returns NaN in a padding row, which does not reach the loss."""

    def forward(self, inputs, targets, factor=1.0):
        """Return the loss of the rows that are no padding, whose outputs are multiplied."""
        rows = self.drop(self.first(inputs))[:-1]
        return {"loss": (factor * self.last(rows).squeeze(1) - targets[:-1]).square().mean()}


def padded_step(network, earlier, last):
    """Return the recorder of two steps, each with a call that has this factor."""
    recorder = StepRecorder(network)
    for factor in (earlier, last):
        network(torch.randn(3, 4), torch.randn(3), factor=factor)
        recorder.end_step()
    return recorder


@pytest.mark.parametrize("fault", ["loss", "last"])
def test_what_is_non_finite_on_purpose_is_not_blamed(fault):
    """A module is not at fault for what it returned in the step before, with a finite loss."""
    network = Padded()
    network.drop.register_forward_hook(lambda *call: call[-1].index_fill(0, torch.tensor([2]), NAN))
    factors = {"loss": (1.0, INF), "last": (1.0, 1.0)}[fault]
    recorder = padded_step(network, *factors)
    if fault == "last":
        network.last.register_forward_hook(lambda *call: call[-1] * (NAN if next(steps) else 1.0))
        # The replays are those of the last step, the one before, and the last one again.
        steps = iter((True, False, True))
    expected = Origin("activation", "last", 0) if fault == "last" else Origin("loss", "", 0)

    assert replay_step(recorder, 1.0) == expected


def test_a_module_that_was_already_at_fault_is_blamed():
    """What it returned in the step before, with a loss that was not finite, is not on purpose."""
    network = Padded()
    network.first.register_forward_hook(lambda *call: call[-1] * NAN)

    assert replay_step(padded_step(network, 1.0, 1.0), 1.0) == Origin("activation", "first", 0)


class Prompted(Network):
    """A network with a trained tensor that is none of its parameters."""

    def forward(self, inputs, targets=None, **others):
        """Add the prompt to the inputs."""
        return super().forward(inputs + self.prompts[0], targets, **others)


@pytest.mark.parametrize(
    "run", [lambda one: replay_step(one, 1.0), lambda one: unscaled_norm(one, 1.0)]
)
def test_what_is_outside_of_the_network_keeps_its_gradients(run):
    """Inputs may be trained, or have a graph behind them, and a forward may use another leaf."""
    network = Prompted()
    network.prompts = [torch.randn(4, requires_grad=True)]
    leaf, encoder = torch.randn(3, 4, requires_grad=True), nn.Linear(4, 4)
    inputs = leaf + torch.sigmoid(encoder(torch.randn(3, 4)))
    recorder = recorded(
        ((inputs, torch.randn(3)), {}), ((leaf, torch.randn(3)), {}), network=network
    )
    for call in recorder.last_step:
        call.loss_gradient = torch.ones(())
    inputs.sum().backward()
    outside = [leaf, network.prompts[0], *encoder.parameters()]
    before = [None if each.grad is None else each.grad.clone() for each in outside]
    found = run(recorder)

    assert found is None or found > 0
    for tensor, gradient in zip(outside, before, strict=True):
        assert tensor.grad is None if gradient is None else torch.equal(tensor.grad, gradient)


def test_nothing_is_left_behind():
    """A replay draws the step's random numbers and restores generators, buffers and gradients."""
    recorder = recorded(call(), call())
    network = recorder.network
    state = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    gradients = [torch.randn_like(parameter) for parameter in network.parameters()]
    for parameter, gradient in zip(network.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone()
    generator = torch.get_rng_state()
    hooks = [len(module._forward_hooks) for module in network.modules()]

    assert replay_step(recorder, 8.0) is None
    assert torch.equal(torch.get_rng_state(), generator)
    for name, tensor in network.state_dict().items():
        assert torch.equal(tensor, state[name]), name
    for parameter, gradient in zip(network.parameters(), gradients, strict=True):
        assert torch.equal(parameter.grad, gradient)
    assert [len(module._forward_hooks) for module in network.modules()] == hooks
    for original, again in zip(network.outputs[:2], network.outputs[2:], strict=True):
        assert torch.equal(original, again)
    assert replay_step(recorder, 8.0) is None


def test_a_weight():
    """A replay blames a non-finite weight instead of its module's output."""
    recorder = recorded(call(), call())
    with torch.no_grad():
        recorder.network.last.bias.fill_(INF)

    assert replay_step(recorder, 1.0) == Origin("weight", "last.bias", 0)


@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_an_input(value):
    """A non-finite input is reported with its name in ``forward``, its rows and batch indices."""
    (inputs, targets), _ = call()
    inputs[1:, 2] = value
    indices = torch.tensor([7, 3, 9])
    recorder = recorded(call(), ((inputs, targets), {"batch": {"indices": indices}}))
    expected = Origin("input", "inputs", 1, rows=(1, 2), indices=(7, 3, 9))

    assert replay_step(recorder, 1.0) == expected


def test_a_mask_may_be_minus_infinity():
    """In a tensor without a gradient, -inf is not a fault."""
    slopes = torch.where(torch.eye(3) > 0, -1.5, -INF)
    for name, tensor in (("mask", slopes), ("of_scores", torch.zeros(3, 3).fill_diagonal_(-INF))):
        assert replay_step(recorded(call(**{name: tensor})), 1.0) is None


def test_a_loss():
    """A non-finite loss is reported as such if the outputs of all modules are finite."""
    recorder = recorded(((torch.randn(3, 4), torch.full((3,), -INF)), {}))

    assert replay_step(recorder, 1.0) == Origin("loss", "", 0)


def test_a_scale_that_is_too_high():
    """A replay multiplies the loss by the step's loss scale, so a high scale overflows again."""
    recorder = recorded(call())

    assert replay_step(recorder, 3e38).where == "gradient"
    assert replay_step(recorder, 1.0) is None


def test_a_weights_gradient():
    """If all modules have finite gradients, the weight with the non-finite gradient is named."""
    network = Network()
    network.first.weight.register_hook(lambda gradient: gradient * NAN)

    assert replay_step(recorded(call(), network=network), 1.0) == Origin(
        "gradient", "first.weight", 0
    )


def test_the_gradient_nearest_to_the_loss_comes_first():
    """If several modules have non-finite gradients, the module nearest to the loss is named."""
    network = Network()
    for module in (network.first, network.norm):
        module.register_forward_hook(
            lambda _, __, output: output.register_hook(lambda gradient: gradient * NAN) and None
        )

    assert replay_step(recorded(call(), network=network), 1.0) == Origin(
        "gradient", "norm", 0, by_hook=True
    )


class Pair(nn.Module):
    """Two linear layers in a block, with code between them and behind them; returns the loss.

    Args:
        place: Where the code is applied: ``"between"``, ``"inside"`` (in a module between the two),
            ``"behind"`` (in the network's forward) or nowhere.
        code: Takes a tensor and returns one of the same shape.
    """

    class Block(nn.Module):
        """A linear layer, code, and another linear layer."""

        def __init__(self, place, code) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
            self.inner = Applied(code) if place == "inside" else nn.Identity()
            self.between = code if place == "between" else None

        def forward(self, inputs):
            """Return the output of the second layer."""
            hidden = self.inner(self.first(inputs))
            return self.last(hidden if self.between is None else self.between(hidden))

    def __init__(self, place, code) -> None:
        super().__init__()
        self.block = self.Block(place, code)
        self.head = nn.Linear(4, 1)
        self.behind = code if place == "behind" else None

    def forward(self, inputs):
        """Return the mean of the squared outputs."""
        hidden = self.block(inputs)
        return self.head(hidden if self.behind is None else self.behind(hidden)).square().mean()


class Applied(nn.Module):
    """A module that applies a function."""

    def __init__(self, code) -> None:
        super().__init__()
        self.code = code

    def forward(self, inputs):
        """Return what the function returns."""
        return self.code(inputs)


PLACES = {
    "between": ("block", "block.last", "block.inner"),
    "behind": ("", "head", "block"),
    "inside": ("block.inner", "", ""),
}
"""Module at fault; if the code is between modules, the next module and the one before it."""


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_code_that_makes_a_value_non_finite(place, value):
    """The module whose forward has the code is named, and not the next one that received it."""
    name, following, _ = PLACES[place]
    network = Pair(place, lambda hidden: hidden.abs() * value)
    found = replay_step(recorded(((torch.randn(3, 4),), {}), network=network), 1.0)

    assert found == Origin("activation", name, 0, beside=following)


@pytest.mark.parametrize("place", PLACES)
def test_code_that_makes_a_gradient_non_finite(place):
    """The module whose forward has the code is named, and not the one whose output it took."""
    name, _, before = PLACES[place]
    # The root of zero is zero, and its gradient is infinite.
    network = Pair(place, lambda hidden: hidden + (hidden * 0).sqrt())
    found = replay_step(recorded(((torch.randn(3, 4),), {}), network=network), 1.0)

    assert found == Origin("gradient", name, 0, beside=before)


def test_a_healthy_network_with_code_between_modules():
    """Modules may write to their inputs in place, take one tensor twice, or pass it on."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.cut = nn.Linear(4, 4), nn.ReLU(inplace=True)
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, inputs):
            hidden = self.cut(self.linear(inputs))
            return self.attention(hidden, hidden, hidden)[0].square().mean()

    network = Twice()
    inputs = torch.randn(2, 3, 4)
    expected = network(inputs)
    recorder = recorded(((inputs,), {}), network=network)

    assert replay_step(recorder, 1.0) is None
    assert torch.equal(network(inputs), expected)


def test_a_loss_outside_of_the_network():
    """If the loop computes the loss, only the forward is checked."""
    network = Network()
    network.first.weight.register_hook(lambda gradient: gradient * NAN)
    outside = ((torch.randn(3, 4),), {})
    assert replay_step(recorded(outside, network=network), 1.0) is None
    network.drop.register_forward_hook(lambda _, __, output: output * NAN)
    assert replay_step(recorded(outside, network=network), 1.0) == Origin("activation", "drop", 0)


def test_autocast_is_that_of_the_call():
    """A call under autocast is replayed under the same autocast."""
    network = Network()
    with torch.autocast("cpu", torch.bfloat16):
        recorder = recorded(call(), network=network)

    assert replay_step(recorder, 1.0) is None
    assert [output.dtype for output in network.outputs] == [torch.bfloat16] * 2


def test_an_error_of_the_network_leaves_all_as_it_was():
    """If the network raises, so does the replay, after it has restored generators and recorder."""
    network = Network()
    recorder = recorded(call(), network=network)
    handle = network.drop.register_forward_pre_hook(lambda *_: 1 / 0)
    generator = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError, match=re.escape("division by zero")):
        replay_step(recorder, 1.0)
    handle.remove()

    assert torch.equal(torch.get_rng_state(), generator)
    assert recorder.is_on
    assert replay_step(recorder, 1.0) is None


class Scores(nn.Module):
    """Linear scores with -inf in the first column."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, inputs):
        """Return the scores, with the first column masked."""
        mask = torch.zeros(len(inputs), 4, dtype=torch.bool)
        mask[:, 0] = True
        return self.linear(inputs).masked_fill(mask, -INF)


class Attention(nn.Module):
    """Masked scores, a softmax, and a last linear layer; returns the loss."""

    def __init__(self, *, softmax_is_module: bool) -> None:
        super().__init__()
        self.scores = Scores()
        self.softmax = nn.Softmax(-1) if softmax_is_module else None
        self.last = nn.Linear(4, 1)

    def forward(self, inputs):
        """Return the sum of the outputs."""
        scores = self.scores(inputs)
        weights = scores.softmax(-1) if self.softmax is None else self.softmax(scores)
        return self.last(weights).sum()


@pytest.mark.parametrize("softmax_is_module", [True, False])
def test_a_module_whose_output_is_masked(softmax_is_module):
    """-inf in scores is a mask if a softmax makes it finite: it is neither found nor blamed."""
    healthy = Attention(softmax_is_module=softmax_is_module)
    assert replay_step(recorded(((torch.randn(3, 4),), {}), network=healthy), 1.0) is None

    faulty = Attention(softmax_is_module=softmax_is_module)
    faulty.last.register_forward_hook(lambda _, __, output: output * NAN)
    found = replay_step(recorded(((torch.randn(3, 4),), {}), network=faulty), 1.0)
    assert found == Origin("activation", "last", 0)


def test_a_mask_that_becomes_nan():
    """If only -inf is left, the softmax returns NaN: the module that masked is blamed."""
    network = Attention(softmax_is_module=True)
    network.scores.register_forward_hook(lambda _, __, output: output - INF)

    assert replay_step(recorded(((torch.randn(3, 4),), {}), network=network), 1.0) == Origin(
        "activation", "scores", 0
    )


def test_reentrant_checkpointing():
    """A network with reentrant checkpointing is replayed up to the gradients."""

    class Checkpointed(Network):
        def forward(self, inputs, targets=None):
            hidden = checkpoint(self.first, inputs.requires_grad_(), use_reentrant=True)
            return (self.last(hidden).squeeze(1) - targets).square().mean()

    network = Checkpointed()
    weight = network.first.weight
    recorder = recorded(call(), network=network)
    assert replay_step(recorder, 1.0) is None
    weight.register_hook(lambda gradient: gradient * NAN)

    assert replay_step(recorder, 1.0) == Origin("gradient", "first.weight", 0)
    assert weight.grad is None


def test_hooks_of_whole_gradients_do_not_run():
    """A hook that runs after a gradient's accumulation, such as an update, does not run."""
    network = Network()
    ran = []
    network.first.weight.register_post_accumulate_grad_hook(ran.append)
    assert replay_step(recorded(call(), network=network), 1.0) is None
    assert ran == []
    network(*call()[0])["loss"].backward()
    assert len(ran) == 1


def test_weights_that_an_update_has_ruined():
    """If most weights are non-finite, no single weight is blamed."""
    recorder = recorded(call())
    with torch.no_grad():
        for weight in recorder.network.parameters():
            weight.fill_(NAN)

    assert replay_step(recorder, 1.0) == Origin("weights", "", 0)


class Counting(nn.Module):
    """A network that divides its loss by the number of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, inputs, attention_mask):
        """Return the mean over the tokens."""
        return (self.linear(inputs)[..., 0] * attention_mask).sum() / attention_mask.sum()


def test_a_micro_batch_without_tokens():
    """The mask that hides all of them is named."""
    inputs = torch.randn(2, 3, 4)
    good, bad = ((inputs, torch.full((2, 3), value)) for value in (1, 0))
    recorder = recorded((good, {}), (bad, {}), network=Counting())

    assert replay_step(recorder, 1.0) == Origin("mask", "attention_mask", 1)
    recorder = recorded(((inputs, torch.zeros(2, 3, dtype=torch.bool)), {}), network=Counting())
    assert replay_step(recorder, 1.0) == Origin("loss", "", 0)


def test_a_hook_whose_backward_is_not_finite():
    """A hook that replaces an output is named by the module, also if the values are finite."""
    network = Network()
    network.last.register_forward_hook(lambda *args: (args[-1] * 0).abs().sqrt() + args[-1])
    found = replay_step(recorded(call(), network=network), 1.0)

    assert found == Origin("gradient", "last", 0, by_hook=True)


def test_a_micro_batch_without_targets():
    """If the loss is NaN because all labels are ignored, the labels are named."""

    class Classifier(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 3)

        def forward(self, inputs, labels):
            return nn.functional.cross_entropy(self.linear(inputs), labels)

    good, bad = ((torch.randn(2, 4), torch.tensor(labels)) for labels in ([0, 2], [-100, -100]))
    recorder = recorded((good, {}), (bad, {}), network=Classifier())

    assert replay_step(recorder, 1.0) == Origin("targets", "labels", 1)
