"""Programs that each rank runs to monitor a loop of its own."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from mfwrap import StepConfig
from mfwrap.accelerate import attach
from mfwrap.callbacks import LoopMonitor
from support.attached_runs import new_accelerator

__all__ = ["NUM_UPDATES", "resume_monitored_loop"]

NUM_UPDATES = 4


def resume_monitored_loop(rank: int, folder: str) -> list[float]:
    """Save after two updates, make a third, and resume; return this rank's losses of all updates.

    Args:
        rank: Rank of this process.
        folder: Folder of the checkpoint, and of the run folder ``run``.
    """
    del rank  # The accelerator gives each rank its share of the data.
    checkpoint = Path(folder) / "checkpoint"
    losses: list[float] = []
    first = _Loop(folder)
    first.train(range(2), losses)
    first.accelerator.save_state(checkpoint)
    first.train(range(2, 3), [])
    first.monitor.close()
    second = _Loop(folder)
    second.accelerator.load_state(checkpoint)
    second.train(range(2, NUM_UPDATES), losses)
    second.monitor.close()
    return losses


class _Loop:
    """An accelerate loop with a monitor.

    Args:
        folder: Parent of the run folder.
    """

    def __init__(self, folder: str) -> None:
        torch.manual_seed(0)
        self.accelerator = new_accelerator()
        self.attached = attach(self.accelerator, StepConfig(local_norm=True))
        network = nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        optimizer = torch.optim.AdamW(network.parameters(), lr=0.1, fused=True)
        loader: Any = DataLoader(TensorDataset(torch.randn(2 * NUM_UPDATES, 2, 4)), 1)
        self.network, self.optimizer, loader = self.accelerator.prepare(network, optimizer, loader)
        self.batches = list(loader)
        self.monitor = LoopMonitor(self.attached, Path(folder) / "run")

    def train(self, updates: range, losses: list[float]) -> None:
        """Make updates, and append their losses."""
        for number in updates:
            [inputs] = self.batches[number]
            self.accelerator.backward(self.network(inputs).square().mean())
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.monitor.end_step()
            output: Any = self.attached.last_output
            losses.append(output.loss.item())
