"""Gradients are averaged over ranks outside of backward."""

import pytest
import torch
from torch import nn

from mfwrap.step.parts.gradient_reducer import GradientReducer
from support.ranks.own_steps import (
    LAYOUTS,
    OPTIMIZERS,
    train_both,
    train_some_weights,
    train_through_overflow,
)


@pytest.fixture(scope="module")
def trained(two_ranks):
    """Return the results of `train_both` on each rank."""
    return two_ranks.run(train_both)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_documented_step_trains_ranks_like_the_cell(trained, layout, optimizer):
    """With the documented lines, losses and weights are bitwise equal to those of the cell."""
    for rank in trained:
        own, cell = (
            rank[f"{layout}, {optimizer}, {kind}"] for kind in ("GuidesStep", "TrainOneStepCell")
        )
        torch.testing.assert_close(own, cell, rtol=0, atol=0)
        assert own["reducer_flag"] is (layout == "DistributedDataParallel")
    first, second = (rank[f"{layout}, {optimizer}, GuidesStep"]["weights"] for rank in trained)
    torch.testing.assert_close(first, second, rtol=0, atol=0)


def test_ranks_agree_on_an_overflow(two_ranks):
    """A NaN on one rank skips the update on both, even if it is looked for before the reducer."""
    first, second = two_ranks.run(train_through_overflow)

    for name, results in first.items():
        assert results["overflows"] == [False, True, False], name
        assert results["scales"] == [1024.0, 512.0, 512.0], name
        torch.testing.assert_close(results, second[name], rtol=0, atol=0)
        torch.testing.assert_close(
            results["weights"], first["DistributedDataParallel, cell"]["weights"]
        )


def test_assigned_weights_are_averaged(two_ranks):
    """The gradients of a part of the weights are averaged over the ranks, too."""
    (assigned, alone), (other, _) = two_ranks.run(train_some_weights)
    torch.testing.assert_close(assigned, alone, rtol=0, atol=0)
    torch.testing.assert_close(assigned, other, rtol=0, atol=0)


def test_without_other_ranks_gradients_are_returned_unchanged():
    """Without DistributedDataParallel, the reducer returns the same tensors."""
    network = nn.Linear(2, 1)
    weights = list(network.parameters())
    reducer = GradientReducer(network, weights)
    gradients = [torch.ones_like(weight) for weight in weights]

    assert not reducer.sends
    assert all(a is b for a, b in zip(reducer(gradients), gradients, strict=True))


@pytest.mark.parametrize(
    ("grads", "error", "message"),
    [
        (torch.ones(2), TypeError, r"`grads` must be a list or a tuple of gradients, got tensor"),
        ([torch.ones(2)], ValueError, r"`grads` must hold one gradient per weight, 2, got 1"),
    ],
    ids=["tensor", "too few"],
)
def test_each_weight_has_a_gradient(grads, error, message):
    """Anything but one gradient per weight raises an error that says what is expected."""
    network = nn.Linear(2, 1)

    with pytest.raises(error, match=message):
        GradientReducer(network, list(network.parameters()))(grads)
