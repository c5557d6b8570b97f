"""The server that forks a process for each run of the tests that kill runs."""

import signal

import pytest

from support.crash.fork_server import Task

pytestmark = pytest.mark.slow

KILLED_AT_A_BAR = """
import os, signal
from tqdm import tqdm
with tqdm.get_lock():
    os.kill(os.getpid(), signal.SIGKILL)
"""

WITH_A_BAR = """
from tqdm import tqdm
list(tqdm(range(2)))
"""


def test_a_killed_run_leaves_no_lock(fork_server, tmp_path):
    """A run that is killed while it draws a bar of tqdm does not stop the next one at its bar."""
    statuses = [
        fork_server.run(Task(program="builtins:exec", arguments=(code,), folder=str(tmp_path)))
        for code in (KILLED_AT_A_BAR, WITH_A_BAR)
    ]

    assert [ended.status for (ended,) in statuses] == [-signal.SIGKILL, 0]
