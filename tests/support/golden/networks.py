"""The networks of the recorded runs."""

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional


class LinearProbe(nn.Module):
    """A network with parameters w0, w1, ... whose gradients are the inputs."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        super().__init__()
        for name, weight in weights.items():
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Return the sum of all products of a weight and its input."""
        products = [w * x for w, x in zip(self.parameters(), inputs, strict=True)]
        return torch.stack([product.sum() for product in products]).sum()


class HalfProbe(LinearProbe):
    """A `LinearProbe` that multiplies in float16."""

    def forward(self, *inputs: Tensor) -> Tensor:
        products = [w.half() * x.half() for w, x in zip(self.parameters(), inputs, strict=True)]
        return torch.stack([product.float().sum() for product in products]).sum()


class MLP(nn.Module):
    """A network of linear layers fc0, fc1, ... with activations between them and a loss."""

    def __init__(self, dims: Sequence[int], activation: str, loss: str | None) -> None:
        super().__init__()
        for index, (inputs, outputs) in enumerate(itertools.pairwise(dims)):
            self.add_module(f"fc{index}", nn.Linear(inputs, outputs))
        self._activation: Callable[[Tensor], Tensor] = getattr(torch, activation)
        self._loss = loss

    def predict(self, x: Tensor) -> Tensor:
        """Return the output of the last layer."""
        first, *others = self.children()
        x = first(x)
        for layer in others:
            x = layer(self._activation(x))
        return x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the mean loss."""
        if self._loss == "mse":
            return functional.mse_loss(self.predict(x), y)
        return functional.cross_entropy(self.predict(x), y.long())


class PerToken(MLP):
    """An `MLP` that returns the sum of squared errors and the number of tokens."""

    def __init__(
        self, dims: Sequence[int], activation: str, loss: None, denominator_shape: Sequence[int]
    ) -> None:
        super().__init__(dims, activation, loss)
        self._denominator_shape = tuple(denominator_shape)

    def forward(self, x: Tensor, y: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numerator and the denominator of the loss."""
        squared_error = (self.predict(x) - y).square().sum(1)
        return (mask * squared_error).sum(), mask.sum().reshape(self._denominator_shape)
