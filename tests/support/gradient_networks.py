"""The network whose gradients were recorded from MindSpore."""

from typing import Any

import torch
from torch import Tensor, nn


class GradientNetwork(nn.Module):
    """A linear layer without bias, with a mean squared error.

    Args:
        weight: Weight of the layer, shape ``(1, in)``, as nested lists of numbers.
        outputs: What the network returns: ``"one_output"`` for the loss, ``"two_outputs"`` for loss
            and logits, ``"three_outputs"`` for loss, logits and two times the logits.
    """

    def __init__(self, weight: Any, outputs: str = "two_outputs") -> None:
        super().__init__()
        values = torch.tensor(weight, dtype=torch.float32)
        self.fc = nn.Linear(values.shape[1], values.shape[0], bias=False)
        self.fc.weight = nn.Parameter(values)
        self.loss = nn.MSELoss()
        self.outputs = outputs

    def forward(self, x: Tensor, y: Tensor) -> Any:
        """Return the values that `outputs` selects."""
        logits = self.fc(x).squeeze()
        loss = self.loss(logits, y)
        return {
            "one_output": loss,
            "two_outputs": (loss, logits),
            "three_outputs": (loss, logits, 2 * logits),
        }[self.outputs]


X = torch.tensor([[1.0, 2.0, 3.0]])
Y = torch.tensor(19.0)


def network() -> GradientNetwork:
    """Return the network of MindSpore's notebook on gradients."""
    return GradientNetwork([[2, 3, 4]])


def layers(*, bias: bool = True) -> nn.Sequential:
    """Return a small network in float64."""
    return nn.Sequential(nn.Linear(3, 4, bias=bias), nn.Tanh(), nn.Linear(4, 1)).double()


def inputs(*shape: int) -> Tensor:
    """Return random inputs in float64."""
    return torch.randn(*shape, dtype=torch.float64)
