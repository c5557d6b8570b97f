"""Gradient functions agree with torch's gradients and check their arguments."""

import doctest
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from mfwrap import GradOperation, grad, value_and_grad
from support.gradient_networks import X, Y, inputs, layers, network


def test_the_notebook_prints_what_the_guide_shows():
    """Every cell of MindSpore's notebook on gradients prints the output that the guide shows."""
    path = Path(__file__).with_name("functional_notebook.txt")
    options = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    try:
        failures, cells = doctest.testfile(
            str(path), module_relative=False, optionflags=options, report=True
        )
    finally:
        torch.set_grad_enabled(True)

    assert cells > 50
    assert failures == 0


def test_weights_are_those_of_autograd():
    """Value and gradients of a network are bitwise equal to those of autograd."""
    model, x = layers(), inputs(5, 3)

    value, gradients = value_and_grad(model, None, model.parameters())(x)

    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    torch.testing.assert_close(value, model(x).detach(), rtol=0, atol=0)
    torch.testing.assert_close(gradients, expected, rtol=0, atol=0)


@given(st.lists(st.integers(0, 3), min_size=1, max_size=4, unique=True), st.integers(0, 2**16))
def test_positions_are_those_of_torch_func(positions, seed):
    """For any positions in any order, the gradients agree with ``torch.func.grad``."""
    generator = torch.Generator().manual_seed(seed)
    args = [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(4)]

    def fn(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> Tensor:
        return (a * b.sin() + c * d.exp() * a).sum()

    actual = grad(fn, tuple(positions))(*args)
    expected = torch.func.grad(fn, tuple(positions))(*args)
    torch.testing.assert_close(actual if len(positions) > 1 else (actual,), expected)


def test_keywords_and_other_arguments_pass_through():
    """Keywords and arguments that are not tensors reach the function unchanged."""
    seen = []

    def fn(x: Tensor, times: int, *, offset: Tensor, name: str) -> Tensor:
        seen.append((times, name))
        return (x * times + offset).sum()

    gradient = grad(fn)(X, 3, offset=Y, name="a")

    assert seen == [(3, "a")]
    assert torch.equal(gradient, torch.full_like(X, 3))


def test_names_of_weights_are_the_modules():
    """``return_ids`` names each weight and each position."""
    model = layers()
    gradients = grad(model, (0,), model.parameters(), return_ids=True)(inputs(2, 3))

    (position, _), named = gradients
    assert position == 0
    assert [name for name, _ in named] == [name for name, _ in model.named_parameters()]


WRONG = {
    "fn": (lambda: grad(3), TypeError, "`fn` must be callable, got 3 of type int"),
    "both none": (lambda: grad(network(), None), ValueError, "must not both be None"),
    "negative": (lambda: grad(network(), -1), ValueError, "different positions >= 0, got -1"),
    "twice": (
        lambda: grad(network(), (0, 0)),
        ValueError,
        r"different positions >= 0, got \(0, 0\)",
    ),
    "empty": (lambda: grad(network(), ()), ValueError, "positions >= 0"),
    "bool": (lambda: grad(network(), (True,)), TypeError, "`grad_position` must be an int"),
    "float": (lambda: grad(network(), 0.0), TypeError, "`grad_position` must be an int"),
    "list": (lambda: grad(network(), [0]), TypeError, "`grad_position` must be an int"),
    "no weights": (lambda: grad(network(), 0, []), ValueError, "at least one parameter, got none"),
    "names": (lambda: grad(network(), 0, ["fc"]), TypeError, "only parameters, got 'fc'"),
    "weights": (lambda: grad(network(), 0, 5), TypeError, "must be a parameter or a list"),
    "has_aux": (lambda: grad(network(), has_aux=1), TypeError, "`has_aux` must be a bool"),
    "ids": (lambda: grad(network(), return_ids=1), TypeError, "`return_ids` must be a bool"),
    "ids of a function": (
        lambda: grad(torch.sin, None, [nn.Parameter(X)], return_ids=True),
        ValueError,
        "`return_ids=True` needs weights that are parameters of the module",
    ),
    "too few inputs": (
        lambda: grad(network(), 2)(X, Y),
        ValueError,
        "`grad_position` must be < 2, the number of inputs, got 2",
    ),
    "integers": (
        lambda: grad(network())(X.long(), Y),
        TypeError,
        "input 0 of `fn` must be a floating-point tensor, got torch.int64",
    ),
    "a number": (lambda: grad(network())(1.0, Y), TypeError, "got 1.0 of type float"),
    "one output": (
        lambda: grad(torch.sin, has_aux=True)(X),
        ValueError,
        "at least two outputs, got 1",
    ),
    "no tensor": (lambda: grad(str)(X), TypeError, "must return tensors"),
    "get_all": (lambda: GradOperation(get_all=1), TypeError, "`get_all` must be a bool"),
    "operation of": (lambda: GradOperation()(3), TypeError, "`fn` must be callable"),
    "weights unasked": (
        lambda: GradOperation()(network(), [nn.Parameter(X)]),
        ValueError,
        "`weights` must be None without",
    ),
    "weights missing": (
        lambda: GradOperation(get_by_list=True)(torch.sin),
        ValueError,
        "`weights` must be given",
    ),
    "sens missing": (
        GradOperation(sens_param=True)(torch.sin),
        ValueError,
        "needs a last positional argument",
    ),
    "sens shape": (
        lambda: GradOperation(sens_param=True)(torch.sin)(X, torch.ones(2)),
        ValueError,
        "`sens` must have the shapes of the outputs",
    ),
    "sens type": (
        lambda: GradOperation(sens_param=True)(torch.sin)(X, "1"),
        TypeError,
        "`sens` must be a number or hold tensors",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), WRONG.values(), ids=WRONG)
def test_errors(call, error, message):
    """Each wrong argument has MindSpore's exception type and says what was expected."""
    with pytest.raises(error, match=message) as raised:
        call()
    assert raised.type is error


def test_frozen_weights_are_refused():
    """Weights that do not require gradients are an error."""
    model = layers()
    model[0].weight.requires_grad = False
    with pytest.raises(ValueError, match=r"must require gradients, .* at the indices \[0\]"):
        grad(model, None, model.parameters())(inputs(2, 3))


def test_grad_operation_of_all_inputs():
    """With `get_all`, only tensor inputs have gradients; gradients of integers are zeros."""

    def fn(x: Tensor, labels: Tensor, name: str, y: Tensor) -> Tensor:
        return (x[0, labels] * y).sum()

    of_x, of_labels, of_y = GradOperation(get_all=True)(fn)(X, torch.tensor([0, 2]), "n", Y)

    assert torch.equal(of_x, torch.tensor([[19.0, 0.0, 19.0]]))
    assert torch.equal(of_labels, torch.zeros(2, dtype=torch.int64))
    assert of_y == 4.0


def test_grad_operation_of_all_weights():
    """Without a list of weights, all trainable weights of the module are used."""
    model, x = layers(), inputs(2, 3)
    model[2].bias.requires_grad = False

    (of_x,), of_weights = GradOperation(get_all=True, get_by_list=True)(model)(x)

    trained = [p for p in model.parameters() if p.requires_grad]
    expected = grad(model, 0, trained)(x)
    torch.testing.assert_close((of_x.detach(), of_weights), (expected[0].detach(), expected[1]))


@pytest.mark.parametrize("sens", [4.0, torch.full((2, 1), 4.0, dtype=torch.float32)], ids=str)
def test_grad_operation_with_sens(sens):
    """With `sens_param`, the last argument is the gradient of the output: a number or a tensor."""
    model, x = layers(), inputs(2, 3)

    weighted = GradOperation(get_by_list=True, sens_param=True)(model)(x, sens)

    expected = tuple(4 * gradient for gradient in grad(model, None, model.parameters())(x))
    torch.testing.assert_close(weighted, expected)


def test_sens_of_one_element_fits_a_scalar():
    """A `sens` of shape ``(1,)`` is accepted for an output of shape ``()``."""
    model, x = layers(), inputs(2, 3)
    gradients = GradOperation(get_by_list=True, sens_param=True)(
        lambda x: model(x).sum(), model.parameters()
    )

    torch.testing.assert_close(gradients(x, torch.tensor([4.0])), gradients(x, 4.0))


def test_grad_operation_with_sens_of_several_outputs():
    """With `sens_param` and several outputs, the last argument has one gradient per output."""
    fn = GradOperation(sens_param=True)(lambda x: (x**2, x**3))

    assert fn(torch.tensor(2.0), (torch.tensor(10.0), torch.tensor(100.0))) == 40.0 + 1200.0
