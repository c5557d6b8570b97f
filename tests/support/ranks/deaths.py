"""A script that runs as one of two ranks; rank 1 fails in the middle of a step.

Command-line arguments: how rank 1 fails, whether the weights are replicated or sharded, the rank of
this process, and the folder for its results.
"""

import os
import signal
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from mfwrap import ExponentialMovingAverage, MFTrainOneStepCell
from mfwrap.sharded_checkpoint import save_sharded
from support.small_networks import TokenClassifier, labelled_batches
from support.training_state import training_state

__all__ = ["GOOD_STEPS", "FailingClassifier", "new_training"]

GOOD_STEPS = 2
START = timedelta(seconds=120)
"""How long a rank waits for the other rank to start."""

STEP = timedelta(seconds=15)
"""How long a rank waits for the other rank within a step."""


class FailingClassifier(TokenClassifier):
    """A `TokenClassifier` that fails in the way that `failure` names."""

    failure = ""
    """``"killed"``, ``"raises"`` or ``"raises and stays"``; ``""`` for no failure."""

    def forward(
        self, inputs: Tensor, labels: Tensor, loss_factor: Tensor | float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """Return the summed loss and the number of targets, or fail.

        The failure ``"killed"`` kills the process in the backward; other failures raise here.
        """
        if self.failure.startswith("raises"):
            msg = "this rank's batch is damaged"
            raise ValueError(msg)
        total, count = super().forward(inputs, labels, loss_factor)
        if self.failure == "killed":
            total.register_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        return total, count


def new_training(network: torch.nn.Module) -> tuple[MFTrainOneStepCell, list[Any]]:
    """Return a cell, and the list of all objects whose state a checkpoint holds."""
    optimizer = AdamW(network.parameters(), lr=1e-2, fused=True)
    ema = ExponentialMovingAverage(network, decay=0.9)
    cell = MFTrainOneStepCell(
        network,
        optimizer,
        use_clip_grad=True,
        scale_sense=1024.0,
        local_norm=True,
        ema=ema,
        calculate_per_token_loss=True,
        gradient_accumulation_steps=2,
    )
    return cell, [network, optimizer, cell]


def _local_state(parts: list[Any]) -> dict[str, Any]:
    """Return the state with this rank's shards only: a rank that has died cannot gather shards."""
    state = training_state(*parts)
    return {k: v.to_local().clone() if hasattr(v, "to_local") else v for k, v in state.items()}


def _shared(inner: FailingClassifier, way: str, group: distributed.ProcessGroup) -> torch.nn.Module:
    if way == "replicated":
        return DistributedDataParallel(inner, process_group=group)
    mesh = DeviceMesh.from_group(group, "cpu")
    fully_shard(inner.layers, mesh=mesh)
    fully_shard(inner, mesh=mesh)
    return inner


def main(failure: str, way: str, rank: int, folder: Path) -> None:
    """Train and save a checkpoint, and run a step in which rank 1 fails.

    A rank that survives saves its state before and after the failed step.
    """
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=2,
        timeout=START,
    )
    distributed.barrier()
    group = distributed.new_group(timeout=STEP)
    torch.manual_seed(0)
    inner = FailingClassifier()
    cell, parts = new_training(_shared(inner, way, group))
    distributed.barrier()
    batches = labelled_batches(GOOD_STEPS + 1, seed=rank)
    for batch in batches[:GOOD_STEPS]:
        cell(*batch)
    save_sharded(folder / "checkpoint", cell)
    before = _local_state(parts)
    if rank == 1:
        inner.failure = failure
    try:
        cell(*batches[GOOD_STEPS])
    except (ValueError, RuntimeError):
        torch.save({"before": before, "after": _local_state(parts)}, folder / f"rank{rank}.pt")
        if failure == "raises and stays" and rank == 1:
            # Stay alive until the test closes stdin. The connection stays open, so the other rank
            # notices the failure only when its timeout expires.
            sys.stdin.read()
        raise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), Path(sys.argv[4]))
