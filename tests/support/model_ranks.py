"""Program that two ranks run to train and evaluate with `Model`."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mfwrap import FixedLossScaleManager, Model
from mfwrap.callbacks import EarlyStopping, History, ModelCheckpoint
from support.model_runs import classifier, sgd

__all__ = ["NUM_RANKS", "data", "loader", "run_rank"]

NUM_RANKS = 2


def data(size: int) -> TensorDataset:
    """Return inputs and labels, the same on every rank."""
    generator = torch.Generator().manual_seed(3)
    inputs = torch.randn(size, 8, generator=generator)
    return TensorDataset(inputs, inputs[:, :4].argmax(dim=1))


def loader(size: int, batch_size: int) -> DataLoader:
    """Return a loader of all data in order."""
    return DataLoader(data(size), batch_size)


def run_rank(rank: int, folder: str, port: int) -> None:
    """Train and evaluate as one of the ranks, and write the results to the folder."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(NUM_RANKS),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }
    # Train in a function, so that the network is freed before the process group is destroyed. If
    # the network kept the group alive, freeing the network later could deadlock: the main thread
    # would hold the GIL and wait for a thread of the group, which may need the GIL.
    torch.save(_train(rank, folder), Path(folder) / f"rank{rank}.pt")
    torch.distributed.destroy_process_group()


def _train(rank: int, folder: str) -> dict[str, Any]:
    network = classifier()
    if rank:  # DistributedDataParallel copies the weights of rank 0 to all ranks.
        nn.init.zeros_(network[0].weight)
    model = Model(
        network,
        nn.CrossEntropyLoss(),
        sgd(network),
        metrics={"loss", "accuracy"},
        loss_scale_manager=FixedLossScaleManager(8.0),
    )
    history = History()
    checkpoint = ModelCheckpoint("a", f"{folder}/rank{rank}")
    model.fit(
        2,
        loader(32, 4),
        loader(15, 2),
        callbacks=[history, checkpoint, EarlyStopping("loss", patience=9)],
    )
    return {
        "weights": [weight.detach() for weight in network.parameters()],
        "metrics": model.eval(loader(15, 2)),
        "history": history.history,
    }
