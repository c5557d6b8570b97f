"""Programs in which one of two ranks does fewer updates than the other."""

from typing import Any

import pytest
from torch import distributed

from mfwrap.collectives import rank_watch, watch
from support.ranks.divergence import kept_reports

__all__ = ["fall_behind", "leave_early"]


def _store() -> Any:
    return distributed.distributed_c10d._get_default_store()


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
            seen = watching._messages.ask()[1].description(1)
            distributed.barrier()
            return seen
        with pytest.raises(RuntimeError) as caught:
            watching.end_training()
    _store().set("leave early", "")
    # Stay until rank 0 has asked: the training of the next test resets this rank's status.
    distributed.barrier()
    return str(caught.value)
