"""Programs that each rank runs to test how a monitor finds the origin of a fault."""

from collections.abc import Sequence
from pathlib import Path

from mfwrap.callbacks import ReplicaCheck, TrainingStateMonitor
from support.planted_faults import random_faults
from support.spoilt.blocks import Fault, train_blocks

__all__ = ["NUM_RANKS", "RANK_FAULTS", "run_planted", "run_rank"]

NUM_RANKS = 2
RANK_FAULTS: dict[str, dict[int, list[Fault]]] = {
    "one after the other": {
        0: [Fault(6, "activation", block=3, micro_batch=1), Fault(20, "data", row=4)],
        1: [Fault(3, "gradient", block=1), Fault(12, "activation", block=0, value="inf")],
    },
    "both at once": {
        0: [Fault(5, "activation", block=2)],
        1: [Fault(5, "activation", block=2)],
    },
    "none": {0: [], 1: []},
}
"""Faults by run and rank."""


def run_rank(rank: int, folder: str) -> None:
    """Run every training as one of the ranks; each run writes to a separate folder."""
    for name, faults in RANK_FAULTS.items():
        monitor = TrainingStateMonitor(
            folder=Path(folder) / name, replay=True, local_loss_format="jsonl"
        )
        train_blocks(monitor, faults[rank], num_steps=24)


def run_planted(rank: int, folder: str, seeds: Sequence[int]) -> None:
    """Train twice for each seed as one of the ranks: with planted faults, and without faults."""
    for seed in seeds:
        own = [fault for at, fault in random_faults(seed, NUM_RANKS) if at == rank]
        for name, faults in (("faults", own), ("clean", [])):
            path = Path(folder) / f"{name}_{seed}"
            monitor = TrainingStateMonitor(folder=path, replay=True)
            check = ReplicaCheck(1, folder=path)
            train_blocks(monitor, faults, callbacks=[check], num_steps=30)
