"""A server that has imported mfwrap and forks a process for each run, so that a run starts at once.

The server reads a `Task` per line from stdin and answers each with a line on stdout: how each rank
ended. Importing mfwrap's command line takes seconds, forking a process that has imported it takes
milliseconds. The server is itself such a fork, or a script that a launcher starts.
"""

import contextlib
import ctypes
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import NamedTuple, Self

import torch
from tqdm import tqdm

from support.paths import TESTS
from support.ports import free_port
from support.programs import Program

__all__ = ["Ended", "ForkServer", "Task", "serve"]

_PRELOADED = (
    "mfwrap.callbacks",
    "mfwrap.cli",
    "mfwrap.runner.run",
    "mfwrap.runner.training",
    "support.crash.own_loops",
    "torch._dynamo",
)
"""Modules that runs need. A run that imported them itself would take seconds longer."""

_HANGS_SECONDS = 120
_PR_SET_PTRACER = 0x59616D61


@dataclass(frozen=True, kw_only=True)
class Task:
    """A run, in one process or in one process per rank."""

    program: str
    """``module:function`` that each rank calls."""

    arguments: tuple[object, ...]
    """Positional arguments of the function: values that JSON can represent."""

    folder: str
    """Current folder of the ranks. It gets their output, ``<name>_<rank>.txt``."""

    name: str = "output"
    """Beginning of the name of the output."""

    num_ranks: int = 1

    rank: int = 0
    """Rank that `strace` and `cpu_seconds` apply to. After it has ended with an error or by a
    signal, the other ranks are killed, as a launcher does."""

    strace: tuple[str, ...] = ()
    """Arguments of strace, which traces the rank from its first to its last system call. Empty
    for no strace."""

    cpu_seconds: float | None = None
    """CPU time after which a signal of the kernel ends the rank; ``None`` for no limit."""


class Ended(NamedTuple):
    """How a rank ended."""

    status: int
    """Exit status, or minus the signal that ended the rank."""

    cpu_seconds: float


class ForkServer:
    """The server process; runs tasks one at a time.

    Args:
        launcher: Command that starts the server, such as ``unshare``, with its options.
    """

    def __init__(self, launcher: tuple[str, ...] = ()) -> None:
        if launcher:
            process = subprocess.Popen(
                [*launcher, sys.executable, __file__],
                env={**os.environ, "PYTHONPATH": str(TESTS)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            self._end = process.communicate
            self._requests, self._answers = process.stdin, process.stdout
        else:
            code = "from support.crash.fork_server import serve; serve()"
            program = Program(code, may_start_others=True)
            self._end = program.end
            self._requests, self._answers = program.stdin, program.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(self, task: Task) -> list[Ended]:
        """Run a task; return how each rank has ended."""
        print(json.dumps(asdict(task)), file=self._requests, flush=True)
        return [Ended(*each) for each in json.loads(self._answers.readline())]


def serve() -> None:
    """Answer tasks until stdin is closed."""
    # With one thread, all file operations of a run come from its main thread.
    torch.set_num_threads(1)
    # A run that compiled a module would do more file operations than the next one.
    sys.dont_write_bytecode = True
    for name in _PRELOADED:
        importlib.import_module(name)
    # Children collect garbage often. Without frozen objects they would copy the server's memory.
    gc.collect()
    gc.freeze()
    # The lock that tqdm makes by itself holds a semaphore. Made here, all runs would share it, and
    # one that is killed while it draws a bar would stop all later ones at their first bar. Made by
    # a run, it would have to be deleted at the end, which a run leaves out here.
    tqdm.set_lock(threading.RLock())
    # Leave stdout to the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        task = Task(**json.loads(line))
        print(json.dumps(_answer(task)), file=answers, flush=True)


def _answer(task: Task) -> list[Ended]:
    environment = _environment(task.num_ranks)
    gates, pids = [], []
    for rank in range(task.num_ranks):
        gate, opened = os.pipe()
        is_ready, ready = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(opened)
            os.close(is_ready)
            _let_siblings_trace()
            os.write(ready, b"1")
            _run_rank(task, rank, environment, gate)
        os.close(gate)
        os.close(ready)
        os.read(is_ready, 1)
        os.close(is_ready)
        gates.append(opened)
        pids.append(pid)
    with _traced(pids[task.rank], task.strace):
        for opened in gates:
            # A later rank has a copy of this end, so closing it would not wake its reader.
            os.write(opened, b"1")
            os.close(opened)
        return _wait_for_all(pids)


def _wait_for_all(pids: list[int]) -> list[Ended]:
    ended: dict[int, Ended] = {}
    while len(ended) < len(pids):
        pid, status, usage = os.wait4(-1, 0)
        if pid not in pids:  # strace
            continue
        code = os.waitstatus_to_exitcode(status)
        ended[pid] = Ended(code, usage.ru_utime + usage.ru_stime)
        if code != 0:
            for other in set(pids) - set(ended):
                os.kill(other, signal.SIGKILL)
    return [ended[pid] for pid in pids]


def _environment(num_ranks: int) -> dict[str, str]:
    if num_ranks == 1:
        return {}
    addresses = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    return {**addresses, "WORLD_SIZE": str(num_ranks)}


def _let_siblings_trace() -> None:
    """Let strace attach where Linux allows it only to the ancestors of a process."""
    any_process = ctypes.c_ulong(-1)
    ctypes.CDLL(None).prctl(_PR_SET_PTRACER, any_process, 0, 0, 0)


def _run_rank(task: Task, rank: int, environment: dict[str, str], gate: int) -> None:
    """Call the program, and end this process."""
    status = 1
    try:
        os.read(gate, 1)  # until strace is attached
        os.chdir(task.folder)
        output = os.open(f"{task.name}_{rank}.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if environment:
            os.environ |= {**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)}
        module, _, name = task.program.partition(":")
        program = getattr(importlib.import_module(module), name)
        # A signal that is not handled ends a process that hangs.
        signal.alarm(_HANGS_SECONDS)
        if task.cpu_seconds is not None and rank == task.rank:
            signal.setitimer(signal.ITIMER_PROF, task.cpu_seconds)
        program(*task.arguments)
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:  # noqa: BLE001  (the output shows it)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        # Leave without the handlers that the server has registered.
        os._exit(status)


@contextlib.contextmanager
def _traced(pid: int, arguments: tuple[str, ...]) -> Iterator[None]:
    if not arguments:
        yield
        return
    with subprocess.Popen(
        ["strace", *arguments, "-p", str(pid)], stderr=subprocess.PIPE, text=True
    ) as strace:
        said = strace.stderr.readline()
        assert "attached" in said, said
        yield


if __name__ == "__main__":
    serve()
