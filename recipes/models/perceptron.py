"""A perceptron for tables of numbers, as a model of transformers."""

import itertools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from mfwrap.arguments import check_bool, check_int


class PerceptronConfig(PreTrainedConfig):
    """Sizes of a `Perceptron`.

    Args:
        num_features: Number of values in a row, >= 1.
        hidden_size: Width of the hidden layers, >= 1.
        num_hidden_layers: Number of hidden layers, >= 0; 0 is linear regression.
        standardize: Whether features and targets are scaled to mean 0 and standard deviation 1
            inside the model; see `Perceptron.standardize`.
        kwargs: Other keywords of ``PreTrainedConfig``.

    Raises:
        TypeError: If a size is not an integer, or `standardize` is not a bool.
        ValueError: If a size is out of range.
    """

    model_type = "perceptron"

    def __init__(
        self,
        num_features: int = 1,
        hidden_size: int = 64,
        num_hidden_layers: int = 2,
        standardize: bool = False,  # noqa: FBT001, FBT002  (as in all configurations)
        **kwargs: Any,
    ) -> None:
        self.num_features = check_int("num_features", num_features)
        self.hidden_size = check_int("hidden_size", hidden_size)
        self.num_hidden_layers = check_int("num_hidden_layers", num_hidden_layers, minimum=0)
        self.standardize = check_bool("standardize", standardize)
        super().__init__(**kwargs)


class Scale(nn.Module):
    """Mean and standard deviation of values, which are saved with the weights.

    Args:
        size: Number of values in a row; ``None`` for a single value.
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, size: int | None = None) -> None:
        super().__init__()
        shape = () if size is None else (size,)
        self.register_buffer("mean", torch.zeros(shape))
        self.register_buffer("deviation", torch.ones(shape))

    def measure(self, values: NDArray[np.float64]) -> None:
        """Take over mean and standard deviation of the rows of an array.

        A column of equal values has the deviation 1, so that it becomes 0.

        Args:
            values: Shape ``(N, size)``, or ``(N,)``.
        """
        mean, deviation = values.mean(axis=0), values.std(axis=0)
        # The deviation of equal values may be a rounding error.
        is_constant = deviation <= _MIN_DEVIATION * np.abs(mean)
        mean = np.where(is_constant, values[0], mean)
        self.mean.copy_(torch.from_numpy(np.asarray(mean)))
        self.deviation.copy_(torch.from_numpy(np.where(is_constant, 1.0, deviation)))

    def forward(self, values: Tensor) -> Tensor:
        """Return values with mean 0 and standard deviation 1."""
        return (values - self.mean) / self.deviation

    def inverse(self, values: Tensor) -> Tensor:
        """Return values in their own unit."""
        return values * self.deviation + self.mean


_MIN_DEVIATION = torch.finfo(torch.float32).eps
"""Smallest standard deviation, relative to the mean, that float32 can tell from 0."""


class Perceptron(PreTrainedModel):
    """Predict one number per row: linear layers with GELU, trained on the mean squared error.

    With ``config.standardize``, features and targets are scaled inside the model, so that it takes
    features and predicts targets in their own units. The loss is that of the scaled targets.
    """

    config_class = PerceptronConfig
    _keep_in_fp32_modules_strict = {"feature_scale", "target_scale"}  # noqa: RUF012  (read only)

    def __init__(self, config: PerceptronConfig) -> None:
        super().__init__(config)
        sizes = [config.num_features, *[config.hidden_size] * config.num_hidden_layers]
        layers: list[nn.Module] = []
        for size_in, size_out in itertools.pairwise(sizes):
            layers += [nn.Linear(size_in, size_out), nn.GELU()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(sizes[-1], 1)
        self.feature_scale = Scale(config.num_features) if config.standardize else None
        self.target_scale = Scale() if config.standardize else None
        self.post_init()  # type: ignore[no-untyped-call]  # (transformers has no types for it)

    def standardize(self, features: NDArray[np.float64], targets: NDArray[np.float64]) -> None:
        """Take over mean and standard deviation of the training data.

        Args:
            features: Shape ``(N, num_features)``.
            targets: Shape ``(N,)``.

        Raises:
            ValueError: If the configuration has not set `standardize`.
        """
        if self.feature_scale is None or self.target_scale is None:
            msg = "`standardize` must be true in the configuration, got false"
            raise ValueError(msg)
        self.feature_scale.measure(features)
        self.target_scale.measure(targets)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> ModelOutput:
        """Return ``logits`` of shape ``(N,)``, and the ``loss`` if ``labels`` are given.

        Args:
            features: Shape ``(N, num_features)``.
            labels: Target values, shape ``(N,)``.
        """
        if self.feature_scale is not None:
            features = self.feature_scale(features)
        logits = self.head(self.layers(features)).squeeze(-1)
        loss = None
        if labels is not None:
            targets = labels if self.target_scale is None else self.target_scale(labels)
            loss = torch.nn.functional.mse_loss(logits, targets)
        if self.target_scale is not None:
            logits = self.target_scale.inverse(logits)
        return ModelOutput(logits=logits) if loss is None else ModelOutput(loss=loss, logits=logits)


AutoConfig.register(PerceptronConfig.model_type, PerceptronConfig, exist_ok=True)
AutoModel.register(PerceptronConfig, Perceptron, exist_ok=True)
