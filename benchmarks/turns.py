"""Train in several ways in turns, so that a machine that slows down affects all of them."""

import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar, final

from torch.multiprocessing import get_context

PRELOADED = ["transformers.trainer", "transformers.models.llama.modeling_llama"]
"""Modules, slow to import, that are imported once for the processes of all ways."""


Way = TypeVar("Way")
Arguments = TypeVar("Arguments")


@final
class Turns(Generic[Way]):
    """Processes of which one trains at a time, until its turn ends.

    Args:
        train: What each process does, given its way, a connection and `arguments`. It sends one
            message when it is ready to train and one at the end of each turn; after each it waits
            for a message that lets it go on.
        ways: One for each process.
        arguments: Passed on to the processes.

    Raises:
        EOFError: If a process fails. The others end with this process, because they are daemons.
    """

    def __init__(
        self,
        train: Callable[[Way, Connection, Arguments], None],
        ways: Sequence[Way],
        arguments: Arguments,
    ) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._turns = {}
        self._processes = []
        for way in ways:
            turn, other_end = context.Pipe()
            process = context.Process(target=train, args=(way, other_end, arguments), daemon=True)
            process.start()
            other_end.close()
            self._turns[way] = turn
            self._processes.append(process)
        for turn in self._turns.values():
            turn.recv()

    def take(self, way: Way) -> tuple[float, Any]:
        """Let a process train for one turn; return its seconds, and the message at its end."""
        start = time.perf_counter()
        self._turns[way].send("go on")
        message = self._turns[way].recv()
        return time.perf_counter() - start, message

    def end(self) -> None:
        """Let each process train to its end.

        Raises:
            RuntimeError: If one fails.
        """
        for turn, process in zip(self._turns.values(), self._processes, strict=True):
            turn.send("go on")
            process.join()
            if process.exitcode:
                message = f"a process ended with exit code {process.exitcode}"
                raise RuntimeError(message)
