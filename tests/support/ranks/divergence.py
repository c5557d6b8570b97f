"""Programs in which the ranks start different collectives, or one rank stays away."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import distributed

from mfwrap import collectives
from support.ranks import compared_collectives

__all__ = ["DIVERGING", "barriers_at_two_places", "diverge", "stay_away"]


def _gather_beside_a_barrier(rank: int) -> None:
    # For example, only rank 0 saves the state of a callback, and this state needs a gather.
    if rank == 0:
        collectives.gather_objects("evidence")
    distributed.barrier()


def _other_shape(rank: int) -> None:
    collectives.add_over_ranks(torch.ones(2 + rank), distributed.group.WORLD)


def _other_dtype(rank: int) -> None:
    dtype = torch.float32 if rank == 0 else torch.float64
    collectives.add_over_ranks(torch.ones(2, dtype=dtype), distributed.group.WORLD)


def _other_line(rank: int) -> None:
    if rank == 0:
        collectives.gather_objects(0)
    else:
        collectives.gather_objects(1)


def _other_object(rank: int) -> None:
    if rank == 0:
        distributed.broadcast_object_list([0], src=0)
    else:
        distributed.all_gather_object([None, None], 0)


DIVERGING = {
    "a gather beside a barrier": _gather_beside_a_barrier,
    "another shape": _other_shape,
    "another dtype": _other_dtype,
    "another line": _other_line,
    "another function of torch": _other_object,
}
"""Programs in which the ranks start different collectives, by name."""


def diverge(rank: int, name: str) -> str:
    """Run a program of `DIVERGING`; return the message of its error."""
    with pytest.raises(RuntimeError) as caught:
        DIVERGING[name](rank)
    return str(caught.value)


def barriers_at_two_places(rank: int) -> int:
    """Call ``barrier`` at different lines on the two ranks, as accelerate does."""
    if rank == 0:
        distributed.barrier()
    else:
        distributed.barrier()
    return rank


class _KeepReports(logging.Handler):
    """Keep what is logged, and set a key of the store so that the other rank can wait for it.

    Args:
        key: Key of the store that is set when something is logged.
    """

    def __init__(self, key: str) -> None:
        super().__init__()
        self.reports: list[str] = []
        self._key = key

    def emit(self, record: logging.LogRecord) -> None:
        """Keep a report."""
        self.reports.append(record.getMessage())
        distributed.distributed_c10d._get_default_store().set(self._key, "")


@contextmanager
def kept_reports(key: str) -> Iterator[list[str]]:
    """Within the block, keep what mfwrap logs, and set a key of the store at each message."""
    handler = _KeepReports(key)
    logging.getLogger("mfwrap").addHandler(handler)
    try:
        yield handler.reports
    finally:
        logging.getLogger("mfwrap").removeHandler(handler)


def stay_away(rank: int) -> list[str]:
    """Let rank 1 start a collective only after rank 0 has reported it missing; return reports."""
    with pytest.MonkeyPatch.context() as patch, kept_reports("stay away") as reports:
        patch.setattr(compared_collectives, "SECONDS_BEFORE_REPORT", 0.1)
        if rank == 1:
            distributed.distributed_c10d._get_default_store().wait(["stay away"])
        collectives.gather_objects(rank)
    return reports
