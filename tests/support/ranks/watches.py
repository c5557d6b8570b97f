"""Programs in which one of two ranks does fewer updates than the other."""

import threading
from typing import Any

import pytest
import torch
from torch import distributed

from mfwrap.collectives import rank_watch, watch
from mfwrap.collectives.progress import Progress, collective_of_main_thread
from support.ranks.divergence import kept_reports

__all__ = ["collectives_of_updates", "fall_behind", "leave_early"]


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()


def collectives_of_updates(rank: int) -> tuple[list[list[int]], str, list[list[int]]]:
    """Do two updates with two collectives in the first, and one collective between them.

    Returns:
        The collectives of each update; where rank 0's main thread was seen while it waited; and in
        what this rank waited in the first update and after it.
    """
    # The comparison of collectives would make rank 0 wait before it enters the function of torch.
    all_reduce = getattr(distributed.all_reduce, "__wrapped__", distributed.all_reduce)
    progress, store = Progress(distributed.group.WORLD), _store().clone()
    progress.begin_update()
    waits_in = [list(progress.waits_in())]
    if rank == 0:
        threading.Thread(target=_tell_collective, args=(store,)).start()
    else:
        store.wait(["waits in"])
    all_reduce(torch.ones(1))
    all_reduce(torch.ones(1))
    progress.end_update()
    waits_in.append(list(progress.waits_in()))
    all_reduce(torch.ones(1))
    progress.begin_update()
    progress.end_update()
    return progress.answer("").of_updates, store.get("waits in").decode(), waits_in


def _tell_collective(store: Any) -> None:
    while not (name := collective_of_main_thread(distributed.group.WORLD)):
        pass
    store.set("waits in", name)


def fall_behind(rank: int) -> str:
    """Begin the second update on rank 0 only, until both ranks have logged a report."""
    watching = rank_watch()
    with (
        pytest.MonkeyPatch.context() as patch,
        kept_reports(f"fall behind {rank}") as reports,
        watching.training(),
    ):
        patch.setattr(watch, "SECONDS_BEFORE_REPORT", 0.5)
        watching.begin_update()
        watching.end_update()
        if rank == 0:
            watching.begin_update()
        _store().wait(["fall behind 0", "fall behind 1"])
        watching.end_update()
    return reports[0]


def leave_early(rank: int) -> str:
    """End the training on rank 1 while rank 0 is in its second update; return what each sees."""
    watching = rank_watch()
    with watching.training():
        watching.begin_update()
        watching.end_update()
        if rank == 0:
            watching.begin_update()
            _store().wait(["leave early"])
            seen = watching.ask()[1].description(1)
            distributed.barrier()
            return seen
        with pytest.raises(RuntimeError) as caught:
            watching.end_training()
    _store().set("leave early", "")
    # Stay until rank 0 has asked: the training of the next test resets this rank's status.
    distributed.barrier()
    return str(caught.value)
