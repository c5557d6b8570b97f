"""Gradients of shards, and gradients that may be differentiated again."""

import pytest
import torch
from torch import Tensor, nn

from mfwrap import grad, value_and_grad
from support.fsdp.gradients import differentiate_again, differentiate_shards
from support.gradient_networks import X, Y, inputs, layers, network


def test_second_and_third_derivatives():
    """Gradient functions can be nested for higher derivatives."""
    x = torch.tensor(0.3, dtype=torch.float64)

    second, third = grad(grad(torch.sin)), grad(grad(grad(torch.sin)))

    torch.testing.assert_close(second(x), -x.sin())
    torch.testing.assert_close(third(x), -x.cos())
    assert not third(x).requires_grad


def test_a_gradient_inside_a_loss_reaches_the_weights():
    """If a loss contains a gradient, the loss's weight gradients agree with autograd's."""
    model, x = layers(), inputs(5, 3)

    def loss(x: Tensor) -> Tensor:
        return grad(model)(x).square().sum()

    value, gradients = value_and_grad(loss, None, model.parameters())(x)

    leaf = x.clone().requires_grad_()
    (inner,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
    expected = torch.autograd.grad(
        inner.square().sum(), list(model.parameters()), allow_unused=True, materialize_grads=True
    )
    torch.testing.assert_close(value, inner.square().sum().detach())
    torch.testing.assert_close(gradients, expected)
    assert not any(gradient.requires_grad for gradient in gradients)


def test_a_gradient_inside_plain_backward_reaches_the_weights():
    """Torch's plain ``backward`` of a gradient penalty computes gradients of the weights."""
    model, x = layers(bias=False), inputs(5, 3)

    grad(model)(x).square().sum().backward()

    leaf = x.clone().requires_grad_()
    (inner,) = torch.autograd.grad(model(leaf).sum(), leaf, create_graph=True)
    expected = torch.autograd.grad(inner.square().sum(), model[0].weight)[0]
    torch.testing.assert_close(model[0].weight.grad, expected)


def test_gradients_of_an_argument_that_requires_them():
    """A gradient can be differentiated with respect to a tensor that the argument depends on."""
    base = torch.tensor(2.0, requires_grad=True)

    gradient = grad(lambda x: x**3)(base * 1)

    torch.testing.assert_close(gradient.detach(), torch.tensor(12.0))
    torch.testing.assert_close(torch.autograd.grad(gradient, base)[0], torch.tensor(12.0))


def test_an_inner_step_is_differentiated_through():
    """The gradient of a loss after an inner gradient step includes second-order terms."""
    weight = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    rate = 0.1

    def after_a_step(x: Tensor) -> Tensor:
        (slope,) = grad(lambda: weight**4, None, [weight])()
        return (weight - rate * slope - x) ** 2

    gradient = grad(after_a_step, None, weight)(torch.zeros((), dtype=torch.float64))

    w = weight.detach()
    expected = 2 * (w - rate * 4 * w**3) * (1 - rate * 12 * w**2)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize("make", [grad, value_and_grad])
def test_a_training_step_keeps_no_graph(make):
    """A training step keeps no graph, so that its activations are freed."""
    model = layers()

    results = make(lambda x: (model(x).sum(), model(x)), None, model.parameters(), has_aux=True)(
        inputs(2, 3)
    )

    for tensor in torch.utils._pytree.tree_leaves(results):
        assert not tensor.requires_grad


def test_under_no_grad_gradients_are_computed_and_not_recorded():
    """Under ``no_grad`` gradients are computed and no graph is recorded."""
    model, x = layers(), inputs(2, 3)
    with torch.no_grad():
        gradient = grad(model)(x)

    assert not gradient.requires_grad
    torch.testing.assert_close(gradient, grad(model)(x).detach())


def test_aux_outputs_are_cut_off():
    """With ``has_aux``, all outputs except the first are detached, even inside another function."""
    x = torch.tensor(2.0)

    def outer(x: Tensor) -> Tensor:
        _, (aux,) = grad(lambda x: (x**2, x**3), has_aux=True)(x)
        return aux + x

    assert grad(outer)(x) == 1.0


@pytest.mark.parametrize(
    "fn", [lambda x: x, lambda x: (x,), lambda x: torch.stack((x, x))], ids=["one", "tuple", "two"]
)
def test_aux_outputs_are_needed(fn):
    """With ``has_aux``, a function must return a tuple of several outputs, not a tensor of them."""
    with pytest.raises(ValueError, match="a function with at least two outputs, got 1"):
        grad(fn, has_aux=True)(torch.tensor(2.0))


def test_the_value_inside_another_function_is_differentiable():
    """``value_and_grad`` inside a function differentiates both the value and the gradient."""

    def outer(x: Tensor) -> Tensor:
        value, gradient = value_and_grad(lambda x: x**3)(x)
        return value + gradient

    assert grad(outer)(torch.tensor(2.0)) == 12.0 + 12.0


def test_what_does_not_depend_has_zeros():
    """Inputs and weights on which no floating-point output depends get gradients of zeros."""
    unused = nn.Parameter(torch.ones(2))

    def fn(x: Tensor, _: Tensor) -> tuple[Tensor, Tensor]:
        return x * 2, torch.arange(3)

    gradients = grad(fn, (0, 1), [unused])(X, Y)

    (of_x, of_y), (of_unused,) = gradients
    assert torch.equal(of_x, torch.full_like(X, 2))
    assert torch.equal(of_y, torch.zeros(()))
    assert torch.equal(of_unused, torch.zeros(2))
    assert torch.equal(grad(lambda _: torch.ones(()))(X), torch.zeros_like(X))


def test_nothing_is_left_behind():
    """A call leaves no gradients on arguments or parameters, not even if the function raises."""
    model, x = network(), X.clone()

    grad(model, 0, model.parameters())(x, Y)

    assert x.grad is None
    assert not x.requires_grad
    assert model.fc.weight.grad is None
    with pytest.raises(ZeroDivisionError):
        grad(lambda _: 1 // 0)(x)
    (gradient,) = grad(model, None, model.parameters())(x, Y)
    assert not gradient.requires_grad


def test_gradients_of_shards_are_averages_over_ranks(two_ranks):
    """By weights under ``fully_shard``, the gradients are those of backward; ``grad`` is kept."""
    for rank in two_ranks.run(differentiate_shards):
        torch.testing.assert_close(rank["network"], rank["expected"])
        torch.testing.assert_close(rank["function"], rank["expected"])
        assert rank["kept"]


def test_gradients_of_shards_have_no_graph(two_ranks):
    """Nested gradient functions are refused; an input that requires gradients changes nothing."""
    for rank in two_ranks.run(differentiate_again):
        assert len(rank["errors"]) == 3
        assert all("cannot be differentiated again" in error for error in rank["errors"])
        torch.testing.assert_close(rank["found"], rank["expected"])
        assert rank["grad of the input"] is None
