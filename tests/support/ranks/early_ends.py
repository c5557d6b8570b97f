"""Loops of the user's own on two ranks, in which the data of rank 1 end early.

As a script, it runs all cases at once; its argument is an empty folder for the results. A script,
because the ranks must train without the comparison of collectives, which is chosen at import.
"""

import itertools
import json
import logging
import sys
import time
import traceback
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import torch
from torch import Tensor, distributed, nn

from mfwrap import collectives
from mfwrap.collectives import watch
from support.ranks.guards import LOOPS
from support.ranks.processes import start_ranks

__all__ = ["CASES", "Ended", "read_results"]

NUM_UPDATES = (5, 3)
"""Number of updates of each rank."""

ENDS = ("meets", "exits", "fails and meets", "evaluates", "gathers", "gathers and reads late")
"""What rank 1 does after its last update: it starts a collective; its process ends; it raises an
error and starts a collective in a ``finally`` block; it evaluates for longer than other ranks wait
and then does the missing updates; it starts another collective than rank 0 after an update; it does
so, and looks for messages only every 6 seconds, as on a busy machine."""

CASES = list(itertools.product(LOOPS, ENDS))
"""Loops, and what rank 1 does."""


@dataclass(frozen=True)
class Ended:
    """How one rank ended."""

    status: int | None
    """Exit status; ``None`` if the rank hung."""

    seconds: float
    """Time from the first update to the end of the process; rank 1 trains for less than 1 s."""

    log: str
    """What mfwrap has logged."""

    error: str
    """Traceback of the RuntimeError that ended the loop; empty if there is none."""


class _Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # Before each forward, DistributedDataParallel makes the buffers of all ranks equal.
        self.layers = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))

    def forward(self, inputs: Tensor) -> Tensor:
        loss: Tensor = self.layers(inputs).square().mean()
        return loss


def _train(rank: int, loop: str, end: str) -> None:
    if rank == 1 and end.endswith("late"):
        watch._SECONDS_BETWEEN_LOOKS = 6.0
    step = LOOPS[loop](_Network(), 0.1)
    for update in range(NUM_UPDATES[rank]):
        if end.startswith("gathers") and update == 2:
            if rank == 1:
                collectives.gather_objects(rank)
            else:
                distributed.barrier()
        step(torch.ones(4, 2))
    if rank == 1 and end == "evaluates":
        time.sleep(watch.SECONDS_BEFORE_REPORT + 8)
        for _ in range(NUM_UPDATES[0] - NUM_UPDATES[1]):
            step(torch.ones(4, 2))
    if rank == 1 and end == "fails and meets":
        msg = "the shard is damaged"
        raise ValueError(msg)


def _run(rank: int, folder: Path, loop: str, end: str) -> None:
    """Train on one rank; write its log, its error, and when its training was begun."""
    logging.basicConfig(filename=folder / f"log{rank}", format="%(message)s")
    (folder / f"begun{rank}").write_text(str(time.time()), encoding="utf-8")
    try:
        try:
            _train(rank, loop, end)
        finally:
            if end != "exits":
                distributed.barrier()
    except RuntimeError as error:
        text = "".join(traceback.format_exception(error))
        (folder / f"error{rank}").write_text(text, encoding="utf-8")
        raise


def main(folder: Path) -> None:
    """Run all cases at once, and write how the ranks ended."""
    running = {}
    for case in CASES:
        of_case = folder / "-".join(case)
        of_case.mkdir()
        for rank, process in enumerate(start_ranks(of_case, _run, *case)):
            running[process.sentinel] = process, of_case, rank
    deadline = time.monotonic() + 60
    while running and time.monotonic() < deadline:
        for sentinel in wait(list(running), deadline - time.monotonic()):
            process, of_case, rank = running.pop(sentinel)
            begun = float((of_case / f"begun{rank}").read_text(encoding="utf-8"))
            result = {"status": process.exitcode, "seconds": time.time() - begun}
            (of_case / f"ended{rank}").write_text(json.dumps(result), encoding="utf-8")
    for process, _, _ in running.values():
        process.kill()


def read_results(folder: Path, case: tuple[str, str]) -> list[Ended]:
    """Return how the two ranks of a case ended, after `main`."""
    found = []
    for rank in range(2):
        texts = {}
        for name in ("ended", "log", "error"):
            path = folder / "-".join(case) / f"{name}{rank}"
            texts[name] = path.read_text(encoding="utf-8") if path.exists() else ""
        ended = json.loads(texts["ended"]) if texts["ended"] else {"status": None, "seconds": 60.0}
        found.append(Ended(**ended, log=texts["log"], error=texts["error"]))
    return found


if __name__ == "__main__":
    main(Path(sys.argv[1]))
