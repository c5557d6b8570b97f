"""Use the key-value store that the ranks of ``torch.distributed`` share."""

import time
from typing import Any

from torch import distributed

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.0002, 0.02


def new_connection(store: Any, prefix: str) -> Any | None:
    """Return a connection of its own to a store, or ``None`` if the store keeps nothing.

    On a shared connection, a request that waits for an answer would block all other requests of
    this process. Torch's fake process group has a store that keeps nothing.

    Args:
        store: The store.
        prefix: Prefix of all keys of the connection.

    Raises:
        DistError: If the process that hosts the store has ended.
    """
    try:
        connection = distributed.distributed_c10d.PrefixStore(prefix, store.clone())
        # Since torch 2.14, the fake store can be cloned, and claims to have any key.
        return None if connection.check(["is never set"]) else connection
    except distributed.DistError:
        raise
    except (RuntimeError, NotImplementedError):
        return None


def has_keys(store: Any, keys: list[str], seconds: float) -> bool:
    """Wait until a store has some keys; return whether it has them after at most some seconds.

    Unlike the store's own ``wait``, this leaves the connection free for other threads in between,
    and writes no warnings to stderr.
    """
    deadline, pause = time.monotonic() + seconds, _SHORTEST_PAUSE
    while not store.check(keys):
        if time.monotonic() >= deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE)
    return True
