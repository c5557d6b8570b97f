"""Kill the workers of a launcher at random moments; the launcher starts them again."""

import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil

from support.paths import TESTS

__all__ = ["NUM_RANKS", "launch_and_kill"]

NUM_RANKS = 2
_SECONDS_BETWEEN_LOOKS = 0.001
_RESTART, _RANK = "TORCHELASTIC_RESTART_COUNT", "RANK"

Moment = Callable[[psutil.Process], bool]
"""Whether to kill a worker now."""


class Moments:
    """Random moments of a training that writes into a folder.

    Args:
        run: Run folder.
        draw: Random numbers.
        start_seconds: CPU time in which a worker starts, about.
        record_bytes: Growth of the records between two checkpoints, about; 1 without records.
    """

    def __init__(
        self, run: Path, draw: random.Random, start_seconds: float, record_bytes: float
    ) -> None:
        self._run, self._draw = run, draw
        self._start_seconds, self._record_bytes = start_seconds, record_bytes

    def any(self) -> Moment:
        """Return a random moment of a random kind; most are in the middle of the training."""
        kinds = [self.starting, *[self.training] * 4, self.saving]
        return self._draw.choice(kinds)()

    def starting(self) -> Moment:
        """Return a moment before the first step."""
        seconds = self._draw.uniform(0, self._start_seconds)
        return lambda worker: sum(worker.cpu_times()[:2]) >= seconds

    def training(self) -> Moment:
        """Return a moment after some steps of the worker."""
        growth = self._draw.uniform(0, 2 * self._record_bytes)
        before, least = self._progress(), None

        def has_grown(_worker: psutil.Process) -> bool:
            # A resumed worker first cuts off the records after its checkpoint.
            nonlocal least
            now = self._progress()
            if least is None and now == before:
                return False
            least = now if least is None else min(least, now)
            return now >= least + growth

        return has_grown

    def saving(self) -> Moment:
        """Return the moment at which a checkpoint begins to be written."""
        return lambda _worker: any(self._run.glob("_checkpoint-*.partial"))

    def ending(self) -> Moment:
        """Return a moment after the training, while models are evaluated and saved."""
        return lambda _worker: (self._run / "model").exists()

    def _progress(self) -> int:
        """Return the size of all records, plus the number of checkpoints."""
        sizes = [1 for path in self._run.glob("*_*") if path.is_dir()]
        for path in self._run.glob("*.jsonl"):
            try:
                sizes.append(path.stat().st_size)
            except FileNotFoundError:  # removed meanwhile
                continue
        return sum(sizes)


def launch_and_kill(
    folder: Path,
    program: Sequence[str],
    kills: Sequence[tuple[int, Callable[[], Moment]]] = (),
    **environment: str,
) -> tuple[int, int]:
    """Run a program under one command of torchrun, and kill one worker of each of its starts.

    Args:
        folder: Current folder of the program; gets ``output.txt``.
        program: Arguments of torchrun that name the program, and the program's own arguments.
        kills: For each start of the workers, the rank to kill with SIGKILL, and a function that
            makes the moment. torchrun may start the workers once more than there are kills.
        environment: Further variables for torchrun.

    Returns:
        Exit code of torchrun, and number of workers that were killed.
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={NUM_RANKS}", f"--max-restarts={len(kills)}", *program]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1", **environment}
    with (
        (folder / "output.txt").open("w") as output,
        subprocess.Popen(
            command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT
        ) as launcher,
    ):
        num_killed = 0
        for number, (rank, make) in enumerate(kills):
            worker = _worker(launcher, number, rank)
            num_killed += worker is not None and _kill_at(worker, make())
        return launcher.wait(), num_killed


def _worker(launcher: "subprocess.Popen[bytes]", restart: int, rank: int) -> psutil.Process | None:
    """Wait for a worker of one of the launcher's starts; None if the launcher has ended."""
    wanted = {_RESTART: str(restart), _RANK: str(rank)}
    while launcher.poll() is None:
        for child in psutil.Process(launcher.pid).children():
            try:
                if wanted.items() <= child.environ().items():
                    return child
            except (psutil.NoSuchProcess, psutil.AccessDenied):  # it has ended
                continue
        _look_again()
    return None


def _kill_at(worker: psutil.Process, is_now: Moment) -> bool:
    """Kill a worker at a moment; return False if it ends before."""
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE:
        if is_now(worker):
            worker.send_signal(signal.SIGKILL)
            return True
        _look_again()
    return False


def _look_again() -> None:
    threading.Event().wait(_SECONDS_BETWEEN_LOOKS)
