"""A pool of processes that are the ranks of one process group."""

import importlib
import io
import os
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import torch
from torch import distributed, multiprocessing

__all__ = ["RankPool"]

_PATIENCE = timedelta(seconds=120)


class RankPool:
    """Run functions on several ranks at once.

    The processes are started once and used by many tests, because starting one takes seconds.

    Args:
        num_ranks: Number of ranks.
        folder: Empty folder for the file through which the ranks find each other.
    """

    def __init__(self, num_ranks: int, folder: Path) -> None:
        # Both ranks are forked from a process that has imported these modules, which takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["mfwrap.trainer", "mfwrap.callbacks"])
        self._connections: list[Connection] = []
        self._processes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(theirs, rank, num_ranks, str(folder)), daemon=True
            )
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.join(_PATIENCE.total_seconds())

    def run(self, program: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``program(rank, *arguments)`` on every rank, and return the result of each rank.

        Args:
            program: Function that can be imported, and that returns only types that torch.load
                accepts by default: tensors, numbers, strings and containers of these.
            arguments: Further arguments, the same for every rank.

        Raises:
            RuntimeError: If any rank raises; the message holds the tracebacks of all ranks.
        """
        for connection in self._connections:
            connection.send((program.__module__, program.__qualname__, arguments))
        answers = [torch.load(io.BytesIO(each.recv_bytes())) for each in self._connections]
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            raise RuntimeError("\n".join(errors))
        return [answer["result"] for answer in answers]


def _serve(connection: Connection, rank: int, num_ranks: int, folder: str) -> None:
    # accelerate reads the rank and the number of ranks from the environment.
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(num_ranks), "MASTER_ADDR": "localhost"}
    os.environ |= {"LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(num_ranks)}
    torch.set_num_threads(1)
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
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
