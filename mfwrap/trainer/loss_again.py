"""Compute the loss of a batch again by a `compute_loss` of the user's own, without a trace."""

import copy
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from mfwrap.collectives import num_ranks
from mfwrap.compatibility.transformers import (
    COUNT_ITEMS,
    has_own,
    makes_batches_itself,
    method_of,
    prepared_inputs,
)
from mfwrap.tensors.training_forwards import replay
from mfwrap.trainer.view import TrainerView

_MOST_COPIED, _DEPTH = 64, 3
"""Largest number of items of a container that is copied, and how deep containers are copied."""


def loss_of_batch(trainer: TrainerView) -> Callable[[Mapping[str, Any]], Tensor] | None:
    """Return a function that computes the loss of a batch again, as the Trainer computes it.

    The method may count, log, and keep values for its log. So it is that of a twin of the Trainer,
    which has the same attributes, but containers of its own, and logs nothing.

    Returns:
        ``None`` if the Trainer's loss is that of the network, on several ranks, whose
        ``compute_loss`` may wait for each other, and for a Trainer that makes its own batches.
    """
    has_loss = has_own(trainer, "compute_loss") or trainer.compute_loss_func is not None
    is_alone = num_ranks() == 1 and trainer.args.n_gpu <= 1
    if not (has_loss and is_alone) or makes_batches_itself(trainer):
        return None

    def run(batch: Mapping[str, Any]) -> Tensor:
        view: Any = trainer
        with torch.no_grad(), replay(), view.compute_loss_context_manager():
            inputs = prepared_inputs(trainer, batch)
            counts = trainer.model_accepts_loss_kwargs or trainer.compute_loss_func is not None
            number = None
            if counts:
                number = method_of(trainer, COUNT_ITEMS)([inputs], trainer.accelerator.device)
            loss: Tensor = _twin_of(trainer).compute_loss(
                view.model_wrapped, inputs, num_items_in_batch=number
            )
        return loss

    return run


def _twin_of(trainer: TrainerView) -> Any:
    """Return an object of the Trainer's class with its attributes, whose changes stay its own."""
    twin = object.__new__(type(trainer))
    vars(twin).update({name: _own(value, _DEPTH) for name, value in vars(trainer).items()})
    vars(twin)["log"] = lambda *_, **__: None
    return twin


def _own(value: Any, depth: int) -> Any:
    """Return a copy of a small container, whose small containers are copied, too."""
    if not isinstance(value, (dict, list, set, deque)) or len(value) > _MOST_COPIED or not depth:
        return value
    own = copy.copy(value)
    if isinstance(own, dict):
        own.update({key: _own(item, depth - 1) for key, item in own.items()})
    elif isinstance(own, (list, deque)):
        for number, item in enumerate(value):
            own[number] = _own(item, depth - 1)
    return own
