"""Make a process the only rank of a process group."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import distributed

__all__ = ["one_rank"]


@contextlib.contextmanager
def one_rank(backend: str = "gloo", **settings: Any) -> Iterator[None]:
    """Within the block, this process is the only rank of the default process group.

    Args:
        backend: Backend of the group.
        settings: Further settings of ``init_process_group``.
    """
    store = distributed.HashStore()
    distributed.init_process_group(backend, store=store, rank=0, world_size=1, **settings)
    try:
        yield
    finally:
        distributed.destroy_process_group()
