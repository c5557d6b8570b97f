"""A training with `MFTrainer` on two ranks of which one dies, and a SIGTERM to the other rank."""

import os
import signal
import time
from pathlib import Path
from typing import Any

from torch import distributed
from transformers import TrainerCallback, TrainingArguments

from mfwrap.trainer import MFTrainer
from support.ranks.trainers import ROWS, Line

__all__ = ["DEATH", "train_until_one_dies"]

DEATH = 3
"""Update in which one rank dies."""


class _Death(TrainerCallback):
    """Kill a rank after its gradients are reduced; torchrun's SIGTERM then comes to the other."""

    def __init__(self, *, dies: bool, folder: Path) -> None:
        self._dies, self._file = dies, folder / "pid"

    def on_pre_optimizer_step(self, _args: Any, state: Any, _control: Any, **_: Any) -> None:
        """Do so in the update `DEATH`."""
        if state.global_step != DEATH - 1:
            return
        if self._dies:
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


def train_until_one_dies(rank: int, folder: Path, dead: int) -> None:
    """Train and save every two steps; see `_Death`. Write the error of the other rank to a file."""
    _move_store_to_rank_0(rank)
    arguments = TrainingArguments(
        str(folder / "run"),
        max_steps=8,
        save_steps=2,
        per_device_train_batch_size=4,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    death = _Death(dies=rank == dead, folder=folder)
    trainer = MFTrainer(Line(), arguments, train_dataset=ROWS, callbacks=[death])
    try:
        trainer.train()
    except RuntimeError as error:
        (folder / "error").write_text(str(error))
        raise


def _move_store_to_rank_0(rank: int) -> None:
    """Join the ranks through a store that rank 0 hosts, as ``init_process_group`` does."""
    port = [0]
    if rank == 0:
        store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        port = [store.port]
    distributed.broadcast_object_list(port)
    if rank != 0:
        store = distributed.TCPStore("localhost", *port, is_master=False, wait_for_workers=False)
    distributed.destroy_process_group()
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=2)
