"""The perceptron is a model of transformers, and checks its sizes."""

import pytest
import torch

from mfwrap.recipes.models.perceptron import Perceptron, PerceptronConfig


def test_without_hidden_layers_it_is_linear():
    """Without hidden layers, the output is linear and the loss is the mean squared error."""
    model = Perceptron(PerceptronConfig(num_features=3, num_hidden_layers=0))
    features, labels = torch.randn(5, 3), torch.randn(5)
    expected = features @ model.head.weight[0] + model.head.bias
    output = model(features, labels)

    torch.testing.assert_close(output.logits, expected)
    torch.testing.assert_close(output.loss, (expected - labels).square().mean())


def test_it_is_saved_and_loaded(tmp_path):
    """A saved perceptron gives the same output after loading."""
    model = Perceptron(PerceptronConfig(num_features=2, hidden_size=4))
    model.save_pretrained(tmp_path)
    features = torch.randn(3, 2)

    loaded = Perceptron.from_pretrained(tmp_path)
    assert torch.equal(loaded(features).logits, model(features).logits)


@pytest.mark.parametrize(
    ("sizes", "error", "says"),
    [
        ({"num_features": 0}, ValueError, "`num_features` must be >= 1, got 0"),
        ({"hidden_size": 0}, ValueError, "`hidden_size` must be >= 1, got 0"),
        ({"num_hidden_layers": -1}, ValueError, "`num_hidden_layers` must be >= 0, got -1"),
        ({"hidden_size": "8"}, TypeError, "`hidden_size` must be an int, got '8' of type str"),
    ],
)
def test_wrong_sizes(sizes, error, says):
    """A size of a wrong type or out of range is an error."""
    with pytest.raises(error, match=says):
        PerceptronConfig(**sizes)
