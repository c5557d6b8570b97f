"""The loss is read from the output of a network."""

from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import transformers
from torch import nn
from transformers.modeling_outputs import CausalLMOutput

from mfwrap.step.calls import NetworkCall
from mfwrap.step.losses import MeanLoss, named_losses, pair_of

TINY = {
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "pad_token_id": 0,
}


def called(loss, *arguments, **keywords):
    """Call a loss with the network's arguments."""
    return loss(NetworkCall(arguments, keywords))


class Losses(NamedTuple):
    """Losses of a network."""

    lm_loss: torch.Tensor
    mtp_loss: torch.Tensor


class Returns(nn.Module):
    """A network that returns ``make(weight)``."""

    def __init__(self, make):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.make = make

    def forward(self, *arguments, **keywords):
        """Return ``make(weight)`` for any arguments."""
        del arguments, keywords
        return self.make(self.weight)


@pytest.mark.parametrize(
    "make",
    [
        lambda w: w.sum(),
        lambda w: w.sum().reshape(1),
        lambda w: w.sum().reshape(1, 1),
        lambda w: (w.sum(), "logits"),
        lambda w: [w.sum()],
        lambda w: {"loss": w.sum(), "logits": None},
        lambda w: CausalLMOutput(loss=w.sum(), logits=w),
        lambda w: SimpleNamespace(loss=w.sum()),
        lambda w: {"lm_loss": w[0], "mtp_loss": w[1:], "router_loss": None, "logits": w},
        lambda w: Losses(w[0], w[1]),
        lambda w: (w.sum(), w.sum().square()),
    ],
    ids=[
        *("()", "(1,)", "(1, 1)", "tuple", "list", "dict", "ModelOutput", "object"),
        *("named losses", "tuple of named losses", "plain tuple of losses"),
    ],
)
def test_a_mean_loss_is_found_in_every_form(make):
    """The numerator is the network's loss, with shape ``()`` and with its graph."""
    network = Returns(make)
    parts = called(MeanLoss(network))

    assert (parts.numerator.shape, parts.numerator.item(), parts.denominator) == ((), 5.0, None)
    parts.numerator.backward()
    assert torch.equal(network.weight.grad, torch.ones(2))


@pytest.mark.parametrize(
    ("output", "names"),
    [
        ({"lm_loss": 1.0, "mtp_loss": 2.0, "logits": 3.0}, ["lm_loss", "mtp_loss"]),
        ({"loss": 1.0, "aux_loss": 2.0}, ["aux_loss"]),
        ({"loss": 1.0, "logits": 3.0}, []),
    ],
)
def test_named_losses_are_those_beside_the_loss(output, names):
    """Entries whose names contain "loss" are reported, except for the loss itself."""
    tensors = {name: torch.tensor([value]).double() for name, value in output.items()}
    found = named_losses(tensors)

    assert {name: value.item() for name, value in found.items()} == {n: output[n] for n in names}
    assert all(each.shape == () and each.dtype == torch.float32 for each in found.values())


def test_only_mappings_have_named_losses():
    """A tensor, a tuple and an output without a loss have none; a named tuple may have some."""
    one = torch.ones(())
    for output in (one, (one, one), None, {"loss_mask": torch.ones(2)}):
        assert named_losses(output) == {}
    assert named_losses(Losses(one, one)) == {"lm_loss": one, "mtp_loss": one}


def test_a_mean_loss_passes_arguments_on():
    """Positional arguments and keywords reach the network unchanged."""
    inputs, label = torch.randn(4, 2), torch.randn(4)
    seen = []

    class Network(nn.Linear):
        def forward(self, *arguments, **keywords):
            """Record the arguments of the call."""
            seen.append((arguments, keywords))
            return super().forward(arguments[0]).sum()

    called(MeanLoss(Network(2, 1)), inputs, label=label)
    assert seen[0][0][0] is inputs
    assert seen[0][1]["label"] is label


def test_a_mean_loss_of_a_hugging_face_model_is_its_own():
    """The mean loss is the loss that the model computes from labels."""
    model = transformers.BertForSequenceClassification(transformers.BertConfig(**TINY)).eval()
    batch = {"input_ids": torch.arange(3, 17).reshape(2, 7), "labels": torch.tensor([0, 1])}
    parts = called(MeanLoss(model), **batch)

    assert torch.equal(parts.numerator, model(**batch).loss)
    assert parts.denominator is None


NO_LOSS = "`network` must return a loss: a tensor of one element"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda _: None, TypeError, f"{NO_LOSS}.* got NoneType"),
        (lambda _: 5.0, TypeError, f"{NO_LOSS}.* got float"),
        (lambda _: (), TypeError, f"{NO_LOSS}.* got tuple"),
        (lambda w: {"logits": w}, TypeError, f"{NO_LOSS}.* got dict"),
        (lambda w: CausalLMOutput(logits=w), TypeError, f"{NO_LOSS}.* got CausalLMOutput"),
        (lambda w: (None, w), TypeError, f"{NO_LOSS}.* got tuple"),
        (lambda _: (5.0,), TypeError, "the loss .* must be a tensor, got 5.0 of type float"),
        (lambda w: {"lm_loss": w}, ValueError, r"the lm_loss .* one element, got shape"),
        (lambda w: {"lm_loss": w[0].item()}, TypeError, "the lm_loss .* must be a tensor"),
        (lambda w: {"a_loss": w[0], "loss_count": w[0].int()}, TypeError, "rename it"),
        (lambda w: w, ValueError, r"the loss .* one element, got shape \(2,\)"),
        (lambda w: w[:0], ValueError, r"the loss .* one element, got shape \(0,\)"),
        (lambda w: w.sum().detach(), ValueError, "must depend on a trainable parameter"),
        (lambda _: torch.tensor(3), ValueError, "must depend on a trainable parameter"),
    ],
    ids=[
        *("none", "number", "empty tuple", "dict", "output", "none first", "number first"),
        *("named two", "named number", "named count"),
        *("two", "zero", "detached", "int"),
    ],
)
def test_a_network_that_returns_no_loss_is_refused(make, error, message):
    """The error says what a network must return and what this network returned."""
    with pytest.raises(error, match=message):
        called(MeanLoss(Returns(make)))


def test_a_hugging_face_model_without_labels_is_refused():
    """The error says that the batch needs `labels`."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    with pytest.raises(TypeError, match="if the batch has `labels`"):
        called(MeanLoss(model), input_ids=torch.ones((2, 7), dtype=torch.long))


@pytest.mark.parametrize("container", [tuple, list])
@pytest.mark.parametrize(
    "denominator",
    [4, 4.0, torch.tensor(4), torch.tensor([4.0]), torch.tensor(4.0, requires_grad=True)],
    ids=["int", "float", "int64", "(1,)", "with graph"],
)
def test_a_pair_is_numerator_and_denominator(container, denominator):
    """The denominator becomes a float32 scalar without a graph."""
    parts = pair_of(Returns(lambda w: container((w.sum(), denominator)))())

    assert parts.numerator.item() == 5
    assert parts.numerator.requires_grad
    assert (parts.denominator.shape, parts.denominator.dtype) == ((), torch.float32)
    assert parts.denominator.item() == 4
    assert not parts.denominator.requires_grad


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda w: w.sum(), TypeError, r"must return \(numerator, denominator\) .* got Tensor"),
        (lambda w: {"loss": w.sum()}, TypeError, r"\(numerator, denominator\) .* got dict"),
        (lambda w: (w.sum(),), TypeError, "got tuple of 1"),
        (lambda w: [w.sum(), 4, 5], TypeError, "got list of 3"),
        (lambda _: (5.0, 4), TypeError, "the numerator .* must be a tensor, got 5.0"),
        (lambda w: (w, 4), ValueError, r"the numerator .* one element, got shape \(2,\)"),
        (lambda w: (w.sum().detach(), 4), ValueError, "the numerator .* trainable parameter"),
        (lambda w: (w.sum(), "4"), TypeError, "the denominator .* must be a tensor, got '4'"),
        (lambda w: (w.sum(), None), TypeError, "the denominator .* must be a tensor, got None"),
        (lambda w: (w.sum(), w), ValueError, r"the denominator .* one element, got shape \(2,\)"),
    ],
    ids=["tensor", "dict", "one", "three", "number", "vector", "detached", "string", "none", "two"],
)
def test_what_is_no_pair_is_refused(make, error, message):
    """The error names the invalid part of the network's output."""
    with pytest.raises(error, match=message):
        pair_of(Returns(make)())
