"""Small, deterministic networks with a loss, which read no tensor on the host."""

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["IGNORED", "Classifier", "LinearProbe", "TokenClassifier", "labelled_batches"]

IGNORED = -100
"""Label of a token that the loss ignores."""


class LinearProbe(nn.Module):
    """A network whose gradient is the mean of the inputs' rows.

    Its weight has shape ``(num_inputs,)`` and is initialized to zero.
    """

    def __init__(self, num_inputs: int = 2) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(num_inputs))

    def forward(self, inputs: Tensor) -> Tensor:
        return (inputs @ self.weight).mean()


class Classifier(nn.Module):
    """Two layers with tanh between them; the loss is mean cross-entropy times `loss_factor`."""

    def __init__(self, *, num_inputs: int = 8, num_classes: int = 4) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_inputs, 16), nn.Tanh(), nn.Linear(16, num_classes)
        )

    def forward(self, inputs: Tensor, labels: Tensor, loss_factor: Tensor | float = 1.0) -> Tensor:
        loss = functional.cross_entropy(self.layers(inputs), labels, ignore_index=IGNORED)
        return loss * loss_factor


class TokenClassifier(Classifier):
    """A `Classifier` that returns the summed cross-entropy and the number of targets."""

    def forward(
        self, inputs: Tensor, labels: Tensor, loss_factor: Tensor | float = 1.0
    ) -> tuple[Tensor, Tensor]:
        total = functional.cross_entropy(
            self.layers(inputs), labels, ignore_index=IGNORED, reduction="sum"
        )
        return total * loss_factor, labels.ne(IGNORED).sum()


def labelled_batches(
    num_batches: int, *, size: int = 8, num_inputs: int = 8, num_classes: int = 4, seed: int = 1
) -> list[tuple[Tensor, Tensor]]:
    """Return batches of random inputs, with labels that a linear layer can learn."""
    generator = torch.Generator().manual_seed(seed)
    teacher = torch.randn(num_inputs, num_classes, generator=generator)
    inputs = [torch.randn(size, num_inputs, generator=generator) for _ in range(num_batches)]
    return [(batch, (batch @ teacher).argmax(dim=1)) for batch in inputs]
