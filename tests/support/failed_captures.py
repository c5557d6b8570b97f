"""Captures that fail, for processes of their own.

A capture that fails on CUDA may leave torch's allocator and generator as if it went on.
"""

from torch import Tensor

from support.captured_training import train, training
from support.small_networks import Classifier

__all__ = ["reading"]


class Reading(Classifier):
    """A `Classifier` that reads its loss on the host."""

    def forward(self, *arguments: Tensor) -> Tensor:
        loss = super().forward(*arguments)
        assert loss.item() == loss.item()
        return loss


def reading(device: str) -> str | None:
    """Return the error of captured steps of a network that reads its loss; ``None`` for none."""
    trained = training(capture=True, network=Reading, device=device)
    try:
        train(trained, [1.0] * 4)
    except RuntimeError as error:
        return str(error)
    return None
