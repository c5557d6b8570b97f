"""A process that is told to end, and what it makes of it."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from mfwrap.termination import Termination


def tell_to_end():
    """Send this process a SIGTERM."""
    os.kill(os.getpid(), signal.SIGTERM)


def test_the_first_signal_is_noted():
    """The block goes on, and knows."""
    with Termination() as termination:
        assert not termination.is_requested
        tell_to_end()
        went_on = termination.is_requested

    assert went_on
    assert termination.is_requested


def test_each_block_begins_anew():
    """What an earlier block was told does not end a later one."""
    termination = Termination()
    with termination:
        tell_to_end()
    with termination:
        assert not termination.is_requested


@pytest.mark.parametrize(
    "before", [signal.SIG_IGN, signal.SIG_DFL, lambda *_: None], ids=["ignored", "default", "own"]
)
def test_what_was_there_before(before):
    """After the block, signals go where they went before it, also when it raises."""
    at_first = signal.signal(signal.SIGTERM, before)
    try:
        with pytest.raises(KeyError), Termination():
            raise KeyError

        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, at_first)


def test_in_another_thread():
    """Where signals cannot be handled, the block changes nothing and raises nothing."""
    handler = signal.getsignal(signal.SIGTERM)
    found = []

    def run() -> None:
        with Termination() as termination:
            found.extend([signal.getsignal(signal.SIGTERM), termination.is_requested])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert found == [handler, False]
    assert signal.getsignal(signal.SIGTERM) is handler


TOLD_TWICE = """
import os, signal, sys
from mfwrap.termination import Termination

def tell_to_end():
    os.kill(os.getpid(), signal.SIGTERM)

with Termination() as termination:
    tell_to_end()
    print("first", flush=True)
    if sys.argv[1] == "inside":
        tell_to_end()
    print("second", flush=True)
tell_to_end()
print("after", flush=True)
"""


@pytest.mark.parametrize(("second", "printed"), [("inside", "first\n"), ("", "first\nsecond\n")])
def test_the_second_signal_ends_the_process(second, printed):
    """It does at once, with the status of a process that was ended; so does one after the block."""
    command = [sys.executable, "-c", TOLD_TWICE, second]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ended.stderr == ""
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, printed)


IN_LONG_CALL = """
import collections, itertools, os, signal
from mfwrap.termination import Termination

with Termination():
    os.kill(os.getpid(), signal.SIGTERM)
    # In C, without end, and without a look at signals: as a kernel that hangs. Its first element
    # tells that it has begun.
    began = map(os.write, [1], [b"waiting\\n"])
    collections.deque(itertools.chain(began, itertools.repeat(None)), maxlen=0)
"""


def test_the_second_signal_within_a_long_call():
    """It does not wait for a call that never returns."""
    command = [sys.executable, "-c", IN_LONG_CALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(timeout=20)
        finally:
            process.kill()

    assert status == -signal.SIGTERM
