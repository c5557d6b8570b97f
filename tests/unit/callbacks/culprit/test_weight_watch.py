"""Which weights have changed more than training changes them."""

import math

import pytest
import torch
from torch import nn

from mfwrap.callbacks.culprit.finder import WeightWatch
from mfwrap.tensors.wrappers import tensor_norms, trainable


def network() -> nn.Sequential:
    """Return three layers whose biases are zero."""
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in layers:
        nn.init.zeros_(layer.bias)
    return layers


def test_norms_of_many_kinds():
    """Each norm is torch's own in float64, whatever the type and shape, in their order."""
    tensors = [
        torch.randn(3, 4),
        torch.randn(5).bfloat16(),
        torch.randn(()),
        torch.randn(2, 2).double(),
        torch.randn(7).bfloat16(),
    ]
    expected = [tensor.double().norm().item() for tensor in tensors]

    assert tensor_norms(tensors).tolist() == pytest.approx(expected, rel=1e-6)
    assert tensor_norms(tensors).dtype == torch.float32


def test_trainable_names():
    """Plain names, of what is trainable."""
    model = network()
    model[1].requires_grad_(requires_grad=False)
    expected = ["0.weight", "0.bias", "2.weight", "2.bias"]

    assert list(trainable(model)) == expected
    assert list(trainable(torch.compile(model, backend="eager"))) == expected


@pytest.mark.parametrize("factor", [math.nan, math.inf, 100.0, -5.0])
def test_a_weight_that_blows_up(factor):
    """It is named with both norms; those that are as they were are not."""
    model = network()
    watch = WeightWatch(model)
    before = model[1].weight.norm().item()
    with torch.no_grad():
        model[1].weight.mul_(factor)
        model[2].weight.mul_(3.0)
    (found,) = watch.changed()

    assert (found.name, found.norm_before) == ("1.weight", pytest.approx(before, rel=1e-6))
    assert found.norm == pytest.approx(abs(factor) * before, rel=1e-6, nan_ok=True)


def test_the_worst_comes_first():
    """By how much it rose."""
    model = network()
    watch = WeightWatch(model)
    with torch.no_grad():
        model[0].weight.mul_(10.0)
        model[2].weight.mul_(20.0)
        model[1].weight.fill_(math.nan)

    assert [found.name for found in watch.changed()] == ["1.weight", "2.weight", "0.weight"]


def test_what_began_at_zero():
    """A bias may grow to the size that weights have."""
    model = network()
    watch = WeightWatch(model)
    with torch.no_grad():
        model[0].bias.fill_(0.2)
    assert watch.changed() == []
    with torch.no_grad():
        model[0].bias.fill_(20.0)
    assert [found.name for found in watch.changed()] == ["0.bias"]


def test_what_happens_to_all_is_no_cause():
    """An update that was not finite names no weight."""
    model = network()
    watch = WeightWatch(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(math.nan)

    assert watch.changed() == []


def test_a_new_look():
    """A rise that was looked at since is known."""
    model = network()
    watch = WeightWatch(model)
    with torch.no_grad():
        model[0].weight.mul_(10.0)
    watch.look()

    assert watch.changed() == []
