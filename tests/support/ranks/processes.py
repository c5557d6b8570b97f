"""Run a program on two ranks in processes of their own, which may die or hang."""

import os
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from support.programs import FORKING

__all__ = ["run_ranks", "start_ranks"]

NUM_RANKS = 2


def run_ranks(folder: Path, program: Callable[..., None], *arguments: Any) -> list[int | None]:
    """Call ``program(rank, folder, *arguments)`` on two ranks of a process group.

    Args:
        folder: Empty folder.
        program: Function that can be imported.
        arguments: Further arguments, the same for every rank.

    Returns:
        Exit status of each rank; ``None`` for a rank that had not ended after 60 seconds. Such a
        rank is killed.
    """
    ranks = start_ranks(folder, program, *arguments)
    statuses, deadline = [], time.monotonic() + 60
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
        statuses.append(process.exitcode)
    for process in ranks:
        process.kill()
        process.join()
    return statuses


def start_ranks(folder: Path, program: Callable[..., None], *arguments: Any) -> list[BaseProcess]:
    """Start the processes as `run_ranks` does, and return them."""
    # Importing mfwrap takes seconds, which must not count: wait until the server has imported it.
    first = FORKING.Process(target=int)
    first.start()
    first.join()
    ranks = [
        FORKING.Process(target=_run, args=(rank, folder, program, arguments))
        for rank in range(NUM_RANKS)
    ]
    for process in ranks:
        process.start()
    return ranks


def _run(rank: int, folder: Path, program: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS), "MASTER_ADDR": "localhost"}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(NUM_RANKS)}
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    program(rank, folder, *arguments)
