"""Tell the forward passes that train a network from evaluations and replays."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import torch
from torch import nn

_is_replay = ContextVar("_is_replay", default=False)


@contextlib.contextmanager
def replay() -> Iterator[None]:
    """Call networks within the block without training them: `is_training_forward` is false."""
    token = _is_replay.set(True)
    try:
        yield
    finally:
        _is_replay.reset(token)


def is_training_forward(network: nn.Module) -> bool:
    """Return whether a forward pass of `network` that begins now is part of its training.

    It is in training mode, with gradients, and outside of a `replay`. Call this for the whole
    network: if gradient checkpointing repeats the forward pass of an inner module in the backward
    pass, the network itself does not run.
    """
    return network.training and torch.is_grad_enabled() and not _is_replay.get()
