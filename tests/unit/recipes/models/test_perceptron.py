"""The perceptron is a model of transformers, and checks its sizes."""

import numpy as np
import pytest
import torch
from transformers import AutoModel

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


def table(number=200):
    """Return features of very different sizes, one of them constant, and targets."""
    draw = np.random.default_rng(0)
    features = np.stack(
        [draw.normal(50_000, 12_000, number), draw.uniform(0, 1e-3, number), np.full(number, 0.1)],
        axis=1,
    )
    return features, features[:, 0] / 10 + 1e6 * features[:, 1]


def test_standardized_rows():
    """Features and targets have mean 0 and deviation 1 inside, and their own unit outside."""
    features, targets = table()
    model = Perceptron(PerceptronConfig(num_features=3, num_hidden_layers=0, standardize=True))
    model.standardize(features, targets)
    inside = []
    model.head.register_forward_pre_hook(lambda _, inputs: inside.append(inputs[0]))
    output = model(torch.tensor(features).float(), torch.tensor(targets).float())

    scaled = (features - features.mean(axis=0)) / [*features.std(axis=0)[:2], 1]
    scaled[:, 2] = 0
    torch.testing.assert_close(inside[0].double(), torch.tensor(scaled), rtol=1e-4, atol=1e-4)
    weight, bias = model.head.weight[0].double(), model.head.bias.double()
    predicted = torch.tensor(scaled) @ weight + bias
    wanted = torch.tensor((targets - targets.mean()) / targets.std())
    raw = predicted * targets.std() + targets.mean()
    torch.testing.assert_close(output.loss.double(), (predicted - wanted).square().mean())
    torch.testing.assert_close(output.logits.double(), raw, rtol=1e-4, atol=1e-4)


def test_equal_targets():
    """Equal targets have the deviation 1, so that the loss is finite."""
    model = Perceptron(PerceptronConfig(num_features=1, standardize=True))
    model.standardize(np.full((3, 1), 7.0), np.full(3, 0.1))

    assert model(torch.full((3, 1), 7.0), torch.full((3,), 0.1)).loss.isfinite()
    with pytest.raises(ValueError, match="`standardize` must be true in the configuration"):
        Perceptron(PerceptronConfig()).standardize(np.ones((2, 1)), np.ones(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_mean_and_deviation_are_saved(tmp_path, dtype):
    """AutoModel loads a standardized perceptron, whose mean and deviation stay float32."""
    features, targets = table()
    model = Perceptron(PerceptronConfig(num_features=3, hidden_size=4, standardize=True))
    model.standardize(features, targets)
    model.save_pretrained(tmp_path)

    loaded = AutoModel.from_pretrained(tmp_path, dtype=dtype)
    assert type(loaded) is Perceptron
    assert loaded.head.weight.dtype == dtype
    scales = {name: value for name, value in loaded.state_dict().items() if "scale" in name}
    assert len(scales) == 4
    for name, value in scales.items():
        assert torch.equal(value, model.state_dict()[name])


@pytest.mark.parametrize(
    ("sizes", "error", "says"),
    [
        ({"num_features": 0}, ValueError, "`num_features` must be >= 1, got 0"),
        ({"hidden_size": 0}, ValueError, "`hidden_size` must be >= 1, got 0"),
        ({"num_hidden_layers": -1}, ValueError, "`num_hidden_layers` must be >= 0, got -1"),
        ({"standardize": 1}, TypeError, "`standardize` must be a bool, got 1 of type int"),
        ({"hidden_size": "8"}, TypeError, "`hidden_size` must be an int, got '8' of type str"),
    ],
)
def test_wrong_sizes(sizes, error, says):
    """A size of a wrong type or out of range is an error."""
    with pytest.raises(error, match=says):
        PerceptronConfig(**sizes)
