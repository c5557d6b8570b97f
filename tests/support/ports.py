"""Ports for ranks that a test starts."""

import fcntl
import os
import random
import socket
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

_PORTS = range(10_000, 20_000)
"""Ports that Linux gives to nobody who asks for any."""


@cache
def _locks() -> int:
    """Open the file whose bytes stand for ports, and which this process locks until it ends."""
    path = Path(tempfile.gettempdir()) / f"mfwrap-test-ports-{os.getuid()}"
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)


_taken: set[int] = set()


def free_port() -> int:
    """Return a port that is not in use, and that no test of any process gets any more.

    A port that is only tested may be taken by another test before the ranks use it.
    """
    for port in random.SystemRandom().sample(_PORTS, len(_PORTS)):
        if port in _taken:
            continue
        with suppress(OSError), socket.socket() as server:
            fcntl.lockf(_locks(), fcntl.LOCK_EX | fcntl.LOCK_NB, 1, port)
            _taken.add(port)
            server.bind(("", port))
            return port
    raise AssertionError(_PORTS)
