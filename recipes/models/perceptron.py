"""A network for tables of numbers, in the form that `save_pretrained` and Trainers know."""

import itertools
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils.generic import ModelOutput

__all__ = ["Perceptron", "PerceptronConfig"]


class PerceptronConfig(PreTrainedConfig):
    """Sizes of a `Perceptron`.

    Args:
        num_features: Numbers in a row.
        hidden_size: Width of the layers between.
        num_hidden_layers: How many there are; 0 is linear regression.
        kwargs: As for every configuration.

    Raises:
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
        for name, size, limit in (
            ("num_features", num_features, 1),
            ("hidden_size", hidden_size, 1),
            ("num_hidden_layers", num_hidden_layers, 0),
        ):
            if isinstance(size, bool) or not isinstance(size, int) or size < limit:
                msg = f"`{name}` must be an int >= {limit}, got {size!r}"
                raise ValueError(msg)
        self.num_features = num_features
        self.hidden_size = hidden_size
        self.num_hidden_layers = num_hidden_layers
        super().__init__(**kwargs)


class Perceptron(PreTrainedModel):
    """Layers with GELU between, and one number out; the loss is the mean squared error."""

    config_class = PerceptronConfig

    def __init__(self, config: PerceptronConfig) -> None:
        super().__init__(config)
        sizes = [config.num_features, *[config.hidden_size] * config.num_hidden_layers]
        layers: list[nn.Module] = []
        for size_in, size_out in itertools.pairwise(sizes):
            layers += [nn.Linear(size_in, size_out), nn.GELU()]
        self.layers = nn.Sequential(*layers)
        self.head = nn.Linear(sizes[-1], 1)
        self.post_init()  # type: ignore[no-untyped-call] # transformers types it in part

    def forward(self, features: Tensor, labels: Tensor | None = None) -> ModelOutput:
        """Return ``logits``, shape ``(N,)``, and with ``labels``, shape ``(N,)``, the ``loss``.

        Args:
            features: Shape ``(N, num_features)``.
            labels: What the logits should be.
        """
        logits = self.head(self.layers(features)).squeeze(-1)
        if labels is None:
            return ModelOutput(logits=logits)
        return ModelOutput(loss=torch.nn.functional.mse_loss(logits, labels), logits=logits)
