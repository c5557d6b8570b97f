"""A capture that fails, as a program of its own.

    python -m support.failed_captures cuda

A capture that fails on CUDA may leave torch's allocator and generator as if it went on. The program
prints the error of captured steps of a network that reads its loss, or nothing if there is none.
"""

import os
import sys

from torch import Tensor

from support.captured_training import train, training
from support.small_networks import Classifier


class Reading(Classifier):
    """A `Classifier` that reads its loss on the host."""

    def forward(self, *arguments: Tensor) -> Tensor:
        """Return the loss."""
        loss = super().forward(*arguments)
        assert loss.item() == loss.item()
        return loss


def main(device: str) -> None:
    """Train four steps, the last of which is captured, and print their error."""
    trained = training(capture=True, network=Reading, device=device)
    try:
        train(trained, [1.0] * 4)
    except RuntimeError as error:
        sys.stdout.write(str(error))
    sys.stdout.flush()
    # Leave out what an interpreter does at its end: it may fail with the allocator in this state.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1])
