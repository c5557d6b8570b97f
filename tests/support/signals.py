"""Send signals to processes that tests have started."""

import contextlib
import signal
import subprocess
from typing import Any

__all__ = ["told_until_it_ends"]


def told_until_it_ends(process: "subprocess.Popen[Any]") -> int:
    """Send SIGTERM to a process again and again until it ends, and return its status."""
    for _ in range(300):
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.wait(timeout=0.1)
    msg = "the process does not end"
    raise AssertionError(msg)
