"""A training with `MFTrainer` on two ranks of which one dies, and a SIGTERM to the other."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments

from mfwrap.trainer import MFTrainer
from support.ranks.trainers import ROWS, Line

__all__ = ["DEATH", "train_until_one_dies"]

DEATH = 3
"""Update in which rank 1 dies."""


class _Death(TrainerCallback):
    """Kill rank 1 after its gradients are reduced; rank 0 then gets a SIGTERM, as from torchrun."""

    def __init__(self, rank: int, folder: Path) -> None:
        self._rank, self._file = rank, folder / "pid"

    def on_pre_optimizer_step(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Do so in the update `DEATH`."""
        if state.global_step != DEATH - 1:
            return
        if self._rank == 1:
            self._file.with_suffix(".partial").write_text(str(os.getpid()))
            self._file.with_suffix(".partial").rename(self._file)
            os.kill(os.getpid(), signal.SIGKILL)
        while not self._file.exists() or _is_alive(int(self._file.read_text())):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def train_until_one_dies(rank: int, folder: Path) -> None:
    """Train and save every two steps; see `_Death`."""
    arguments = TrainingArguments(
        str(folder / "run"),
        max_steps=8,
        save_steps=2,
        per_device_train_batch_size=4,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    MFTrainer(Line(), arguments, train_dataset=ROWS, callbacks=[_Death(rank, folder)]).train()
