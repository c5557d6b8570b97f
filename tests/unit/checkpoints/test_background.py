"""A writer in a thread does one thing at a time, and its errors reach who asks."""

import logging
import pickle
import subprocess
import sys
import threading

import pytest

from mfwrap.checkpoints.background import BackgroundWriter


def test_one_at_a_time():
    """The second function starts when the first has returned, in a thread of its own."""
    writer, may_end, done = BackgroundWriter(), threading.Event(), []
    writer.submit(lambda: (may_end.wait(), done.append(threading.current_thread().name)))
    assert writer.is_running

    second = threading.Thread(
        target=lambda: writer.submit(lambda: done.append(f"after {len(done)}"))
    )
    second.start()
    may_end.set()
    second.join()
    writer.wait()
    assert done == ["mfwrap-checkpoint", "after 1"]
    assert not writer.is_running


@pytest.mark.parametrize("ask", ["wait", "submit"])
def test_an_error_is_raised_once(ask):
    """The error is raised by the next call that waits, and forgotten then."""
    writer = BackgroundWriter()
    error = OSError(28, "No space left on device")

    def fail():
        raise error

    writer.submit(fail)
    done = []
    with pytest.raises(OSError, match="No space") as caught:
        writer.wait() if ask == "wait" else writer.submit(lambda: done.append("other"))
    assert caught.value is error
    writer.wait()
    assert done == []


def test_wait_without_a_function():
    """Nothing to wait for is no error."""
    writer = BackgroundWriter()
    writer.wait()
    assert not writer.is_running


def test_a_pickled_writer_is_new():
    """A trainer that is pickled while it writes gets a writer without a thread."""
    writer, may_end = BackgroundWriter(), threading.Event()
    writer.submit(may_end.wait)
    assert not pickle.loads(pickle.dumps(writer)).is_running  # noqa: S301  (made here)
    may_end.set()
    writer.wait()


PROGRAM = """
import logging, sys, threading
from pathlib import Path
from mfwrap.checkpoints.background import BackgroundWriter
logging.basicConfig(stream=sys.stdout)
def write():
    threading.main_thread().join()
    Path(sys.argv[1]).write_text("whole")
    raise OSError("the disk is full")
BackgroundWriter().submit(write)
"""


def test_the_process_ends_after_the_writer(tmp_path):
    """A program that ends waits for the writer, and says what nobody has asked for."""
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "file")]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert (tmp_path / "file").read_text() == "whole"
    assert "a checkpoint could not be written: the disk is full" in told


def test_an_error_that_was_raised_is_not_logged(caplog):
    """What `wait` has raised is not logged again at the end of the process."""
    writer = BackgroundWriter()
    writer.submit(lambda: {}["key"])
    with pytest.raises(KeyError):
        writer.wait()
    with caplog.at_level(logging.ERROR):
        writer._log_error()
    assert caplog.records == []
