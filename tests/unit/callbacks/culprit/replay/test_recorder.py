"""A recorder keeps the inputs and the losses of the calls of one step."""

from collections import OrderedDict, UserDict, namedtuple

import torch
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from mfwrap.callbacks.culprit.replay.recorder import (
    StepRecorder,
    inner_network,
    replaced,
    tensors_in,
)


class Network(nn.Module):
    """A linear layer; with targets it returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 1)

    def forward(self, inputs, targets=None):
        """Return the loss; without targets, the outputs."""
        outputs = self.linear(inputs).squeeze(1)
        return outputs if targets is None else (outputs - targets).square().mean()


def call():
    """Return inputs and targets."""
    return (torch.randn(3, 4), torch.randn(3)), {}


def test_only_training_is_recorded():
    """Only calls in training are recorded, and inputs of old steps are released."""
    network = Network()
    recorder = StepRecorder(network)
    positional, _ = call()
    network(*positional)
    with torch.no_grad():
        network(*positional)
    network.eval()
    network(*positional)
    recorder.end_step()
    assert [each.positional[0] is positional[0] for each in recorder.last_step] == [True]
    recorder.end_step()
    assert recorder.last_step == []
    recorder.close()
    network.train()(*positional)
    recorder.end_step()
    assert recorder.last_step == []


class Joined(torch.autograd.Function):
    """Join outputs as DistributedDataParallel does: an unused one gets None for its gradient."""

    @staticmethod
    def forward(ctx, *outputs):
        """Return the outputs."""
        ctx.set_materialize_grads(False)
        return outputs

    @staticmethod
    def backward(ctx, *gradients):
        """Return the gradients."""
        del ctx
        return gradients


def test_a_loss_that_the_loop_does_not_use():
    """The backward goes on, and the loss has no gradient."""
    network = Network()
    recorder = StepRecorder(network)
    positional, _ = call()
    loss = network(*positional)
    _, used = Joined.apply(loss, loss * 2)
    recorder.end_step()
    used.backward()
    assert recorder.last_step[0].loss_gradient == 2.0

    first, second = network(*positional), network.linear(positional[0]).sum()
    _, used = Joined.apply(first, second)
    recorder.end_step()
    used.backward()
    assert recorder.last_step[0].loss_gradient is None


Pair = namedtuple("Pair", "first second")  # noqa: PYI024  (an untyped one is meant)


def test_tensors_in_containers_are_replaced():
    """Containers keep their classes and are copied; a tensor that is held twice stays one."""
    one, other = torch.ones(2), torch.zeros(1)
    value = (
        [one, {"a": one, "b": "text"}],
        Pair(one, other),
        OrderedDict(a=UserDict(a=other)),
        CausalLMOutput(loss=other, hidden_states=(one, one)),
        None,
    )
    result = replaced(value, lambda tensor: tensor + 1)
    pairs = list(zip(tensors_in(value), tensors_in(result), strict=True))

    assert [type(each) for each in result] == [type(each) for each in value]
    assert all(torch.equal(after, before + 1) for (_, before), (_, after) in pairs)
    assert len(pairs) == 8
    assert len({id(after) for _, (_, after) in pairs}) == 2
    assert result[3].loss is result[3]["loss"] is result[1].second
    assert value[0][0] is one
    assert value[3].loss is other


def test_what_cannot_be_recorded():
    """Networks that need other ranks are not recorded."""
    assert inner_network(nn.Sequential(nn.SyncBatchNorm(2))) is None
    assert isinstance(inner_network(Network()), Network)


def test_the_loss_and_what_the_loop_makes_of_it():
    """The loss is kept as it was returned, with the gradient that the loop's factors give it."""
    network = Network()
    recorder = StepRecorder(network)
    loss = network(*call()[0])
    before = loss.item()
    loss *= 2.0
    (loss * 8.0).backward()
    recorder.end_step()
    (kept,) = recorder.last_step

    assert (kept.loss.item(), kept.loss_gradient.item()) == (before, 16.0)


def test_a_call_that_a_graph_captures_is_not_recorded(monkeypatch):
    """In a capture, a call has no inputs of its own and no readable state of the generator."""
    recorder = StepRecorder(Network())
    recorder.device = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    recorder.network(*call()[0]).backward()
    recorder.end_step()

    assert recorder.last_step == []
