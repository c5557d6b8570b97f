"""The fixture of one, two or four ranks that hold the shards of one network."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from torch import distributed

from support.ranks.pool import RankPool

__all__ = ["Ranks", "ranks"]


class Ranks:
    """Run a function on every rank.

    Args:
        number: Number of ranks.
        pool: Processes that are the ranks. ``None`` makes this process the only rank.
    """

    def __init__(self, number: int, pool: RankPool | None) -> None:
        self.number = number
        self._pool = pool

    def run(self, program: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call ``program(rank, *arguments)`` on every rank, and return the result of each rank."""
        if self._pool is None:
            return [program(0, *arguments)]
        return self._pool.run(program, *arguments)


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(1, id="1 rank"),
        pytest.param(2, id="2 ranks"),
        pytest.param(4, id="4 ranks", marks=pytest.mark.slow),
    ],
)
def ranks(request, tmp_path_factory) -> Iterator[Ranks]:
    """Run the test on one rank, on two ranks, and in slow tests also on four ranks."""
    if request.param == 2:
        yield Ranks(2, request.getfixturevalue("two_ranks"))
        return
    folder = tmp_path_factory.mktemp("ranks")
    with contextlib.ExitStack() as stack:
        pool = None
        if request.param == 1:
            store = distributed.FileStore(str(folder / "store"), 1)
            distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
            stack.callback(distributed.destroy_process_group)
        else:
            pool = stack.enter_context(RankPool(request.param, folder))
        yield Ranks(request.param, pool)
