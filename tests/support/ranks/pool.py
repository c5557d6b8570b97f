"""A pool of processes that are the ranks of one process group."""

import faulthandler
import importlib
import io
import itertools
import os
import signal
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
from torch import distributed

from support.programs import FORKING
from support.ranks.compared_collectives import compare_collectives

__all__ = ["RankPool"]

_PATIENCE = timedelta(seconds=120)


class RankPool:
    """Run functions on several ranks at once.

    The processes are started once and used by many tests, because starting one takes seconds. If
    one of them dies, the test that runs then fails, and the next test gets new processes.

    Args:
        num_ranks: Number of ranks.
        folder: Empty folder for the files through which the ranks find each other.
    """

    def __init__(self, num_ranks: int, folder: Path) -> None:
        self._num_ranks = num_ranks
        self._stores = (folder / f"rendezvous_{start}" for start in itertools.count())
        self._connections: list[Connection] = []
        self._processes: list[Any] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _start(self) -> None:
        store = str(next(self._stores))
        for rank in range(self._num_ranks):
            ours, theirs = FORKING.Pipe()
            process = FORKING.Process(
                target=_serve, args=(theirs, rank, self._num_ranks, store), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def _end(self) -> list[int | None]:
        """End all processes, and return their exit codes."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(_PATIENCE.total_seconds())
        codes = [process.exitcode for process in self._processes]
        self._connections, self._processes = [], []
        return codes

    def run(self, program: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``program(rank, *arguments)`` on every rank, and return the result of each rank.

        Args:
            program: Function that can be imported, and that returns only types that torch.load
                accepts by default: tensors, numbers, strings and containers of these.
            arguments: Further arguments, the same for every rank.

        Raises:
            RuntimeError: If any rank raises or dies; the message holds the tracebacks of all ranks
                that raised, or how each rank has ended.
        """
        if not self._processes:
            self._start()
        try:
            for connection in self._connections:
                connection.send((program.__module__, program.__qualname__, arguments))
            answers = [torch.load(io.BytesIO(each.recv_bytes())) for each in self._connections]
        except (EOFError, OSError):
            ends = [f"rank {rank} {_end_of(code)}" for rank, code in enumerate(self._end())]
            msg = f"a rank died in {program.__name__}: {', '.join(ends)}"
            raise RuntimeError(msg) from None
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise RuntimeError("\n".join(errors))
        return [answer["result"] for answer in answers]


def _end_of(code: int | None) -> str:
    if code is None:
        return "has not ended"
    return f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"


def _serve(connection: Connection, rank: int, num_ranks: int, store: str) -> None:
    # If torch crashes, the places of all threads are in the output of the test.
    faulthandler.enable()
    # accelerate reads the rank and the number of ranks from the environment.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "localhost"}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)}
    torch.set_num_threads(1)
    compare_collectives()
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=num_ranks,
        timeout=_PATIENCE,
    )
    while True:
        try:
            module, name, arguments = connection.recv()
        except EOFError:
            break
        try:
            program = getattr(importlib.import_module(module), name)
            answer = {"result": program(rank, *arguments)}
        except Exception:  # noqa: BLE001  (`run` raises it again in the test)
            answer = {"error": f"rank {rank}: {traceback.format_exc()}"}
        content = io.BytesIO()
        torch.save(answer, content)
        connection.send_bytes(content.getvalue())
    distributed.destroy_process_group()
