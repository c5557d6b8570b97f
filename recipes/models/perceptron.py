"""A perceptron for tables of numbers, as a model of transformers."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

from mfwrap.arguments import check_int


class PerceptronConfig(PreTrainedConfig):
    """Sizes of a `Perceptron`.

    Args:
        num_features: Number of values in a row, >= 1.
        hidden_size: Width of the hidden layers, >= 1.
        num_hidden_layers: Number of hidden layers, >= 0; 0 is linear regression.
        kwargs: Other keywords of ``PreTrainedConfig``.

    Raises:
        TypeError: If a size is not an integer.
        ValueError: If a size is out of range.
    """

    model_type = "perceptron"

    def __init__(
        self,
        num_features: int = 1,
        hidden_size: int = 64,
        num_hidden_layers: int = 2,
        **kwargs: Any,
    ) -> None:
        self.num_features = check_int("num_features", num_features)
        self.hidden_size = check_int("hidden_size", hidden_size)
        self.num_hidden_layers = check_int("num_hidden_layers", num_hidden_layers, minimum=0)
        super().__init__(**kwargs)


class Perceptron(PreTrainedModel):
    """Predict one number per row: linear layers with GELU, trained on the mean squared error."""

    config_class = PerceptronConfig

    def __init__(self, config: PerceptronConfig) -> None:
        super().__init__(config)
        sizes = [config.num_features, *[config.hidden_size] * config.num_hidden_layers]
        layers: list[nn.Module] = []
        for size_in, size_out in itertools.pairwise(sizes):
            layers += [nn.Linear(size_in, size_out), nn.GELU()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(sizes[-1], 1)
        self.post_init()  # type: ignore[no-untyped-call]  # (transformers has no types for it)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> ModelOutput:
        """Return ``logits`` of shape ``(N,)``, and the ``loss`` if ``labels`` are given.

        Args:
            features: Shape ``(N, num_features)``.
            labels: Target values, shape ``(N,)``.
        """
        logits = self.head(self.layers(features)).squeeze(-1)
        if labels is None:
            return ModelOutput(logits=logits)
        return ModelOutput(loss=torch.nn.functional.mse_loss(logits, labels), logits=logits)
