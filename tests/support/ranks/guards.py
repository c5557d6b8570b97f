"""Programs in which two ranks differ before the first update, or one rank fails in the second."""

import logging
from collections.abc import Callable
from datetime import timedelta
from logging.handlers import BufferingHandler
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD

from mfwrap import MFTrainOneStepCell, TrainOneStepWithLossScaleCell, WithLossCell
from mfwrap.accelerate import attach
from mfwrap.collectives import gather_objects
from support.attached_runs import new_accelerator

__all__ = ["LOOPS", "fail_alone", "loop_apart", "train_alone", "train_apart", "train_shards"]


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.error: Exception | None = None

    def forward(self, inputs: Tensor) -> Tensor:
        loss: Tensor = self.layer(inputs).square().mean()
        if self.error is not None:
            loss.register_hook(self._fail)
        return loss

    def _fail(self, _: Tensor) -> None:
        raise self.error


def _cell(network: _Network, lr: float, group: Any = None) -> Callable[[Tensor], Any]:
    wrapped = DistributedDataParallel(network, process_group=group)
    return MFTrainOneStepCell(wrapped, SGD(wrapped.parameters(), lr=lr, fused=True))


def _attached(network: _Network, lr: float) -> Callable[[Tensor], Any]:
    accelerator = new_accelerator()
    attach(accelerator)
    return _prepared(accelerator, network, lr)


def _prepared(accelerator: Accelerator, network: _Network, lr: float) -> Callable[[Tensor], Any]:
    wrapped, optimizer = accelerator.prepare(network, SGD(network.parameters(), lr=lr))

    def step(inputs: Tensor) -> None:
        accelerator.backward(wrapped(inputs))
        optimizer.step()
        optimizer.zero_grad()

    return step


LOOPS: dict[str, Callable[..., Callable[[Tensor], Any]]] = {"cell": _cell, "attach": _attached}
"""Functions that return a training step, by name."""


def train_apart(rank: int) -> str:
    """Train a cell with another learning rate on each rank; return the message of the error."""
    step = _cell(_Network(), 0.1 + 0.1 * rank)
    with pytest.raises(RuntimeError) as caught:
        step(torch.ones(1, 2))
    return str(caught.value)


def train_alone(rank: int, name: str) -> str:
    """Train a plain network of another size on each rank; return the message of the error.

    Args:
        rank: Rank of this process.
        name: ``cell``, ``loss scale cell``, or ``attach`` for a loop that does not prepare its
            network.
    """
    network = nn.Linear(2, 1 + rank)
    optimizer = SGD(network.parameters(), lr=0.1)
    with_loss = WithLossCell(network, nn.MSELoss())
    cell: Callable[..., Any] | None = None
    if name == "cell":
        cell = MFTrainOneStepCell(with_loss, optimizer)
    elif name == "loss scale cell":
        cell = TrainOneStepWithLossScaleCell(with_loss, optimizer, torch.tensor(8.0))
    else:
        accelerator = new_accelerator()
        attach(accelerator)
        prepared = accelerator.prepare(optimizer)
    message = ""
    for _ in range(2):
        inputs, targets = torch.ones(1, 2), torch.ones(1, 1 + rank)
        try:
            if cell is not None:
                cell(inputs, targets)
            else:
                accelerator.backward(nn.functional.mse_loss(network(inputs), targets))
                prepared.step()
                prepared.zero_grad()
        except RuntimeError as error:
            message = str(error)
        # One of the ranks may do its first update before the other has announced its network.
        gather_objects(rank)
    return message


def train_shards(rank: int) -> tuple[str, str]:
    """Share a network of another size within each of two pairs of ranks.

    Returns:
        The warning that the logger ``mfwrap`` gets in three updates, and the message of the error
        if the ranks of a pair then have other learning rates.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pairs", "data"))["data"]
    pair, place = divmod(rank, 2)
    handler = BufferingHandler(100)
    logging.getLogger("mfwrap").addHandler(handler)
    error = ""
    for lr in (0.1, 0.1 + 0.1 * place):
        network = WithLossCell(nn.Linear(2, 1 + pair), nn.MSELoss())
        fully_shard(network, mesh=mesh)
        cell = MFTrainOneStepCell(network, SGD(network.parameters(), lr=lr))
        for _ in range(2):
            try:
                cell(torch.ones(1, 2), torch.ones(1, 1 + pair))
            except RuntimeError as raised:
                error = str(raised)
            # One pair may do its first update before the other pair has announced its network.
            gather_objects(rank)
    return "\n".join(record.getMessage() for record in handler.buffer), error


def loop_apart(rank: int) -> str:
    """Train an attached loop like `train_apart`, and return the message of the error.

    Before that, train with the same learning rate on both ranks, and free the accelerator's memory.
    """
    accelerator = new_accelerator()
    attach(accelerator)
    _prepared(accelerator, _Network(), 0.1)(torch.ones(1, 2))
    accelerator.free_memory()
    step = _prepared(accelerator, _Network(), 0.1 + 0.1 * rank)
    with pytest.raises(RuntimeError) as caught:
        step(torch.ones(1, 2))
    return str(caught.value)


def fail_alone(rank: int) -> str:
    """Let rank 1 raise in the cell's second update; return rank 0's notes and rank 1's message."""
    group = distributed.new_group(timeout=timedelta(seconds=2))
    network = _Network()
    step = _cell(network, 0.1, group)
    step(torch.ones(1, 2))
    if rank == 1:
        network.error = ValueError("the batch is damaged")
    with pytest.raises((RuntimeError, ValueError)) as caught:
        step(torch.ones(1, 2))
    # The program goes on after the error: the ranks meet again.
    gather_objects(rank)
    return str(caught.value) if rank == 1 else " ".join(caught.value.__notes__)
