"""After a SIGTERM or SIGUSR1 at any rank, all ranks stop after the same step."""

import faulthandler
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from datetime import timedelta

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import distributed

from mfwrap import termination
from mfwrap.termination import LastStep, RankTermination, StopFlag, exiting_when_stopped
from support.signals import told_until_it_ends


def tell_to_end(number=signal.SIGTERM):
    """Send this process a signal."""
    os.kill(os.getpid(), number)


CPU = torch.device("cpu")
NUM_RANKS = 3
NUM_STEPS = 4
PATIENCE = 60.0
"""Seconds after which ranks that wait for each other count as deadlocked."""


@pytest.fixture(autouse=True)
def _checks_often(monkeypatch):
    monkeypatch.setattr(termination, "_SECONDS_BETWEEN_CHECKS", 0.001)


def stores(kind):
    """Return the handle of each rank to one key-value store."""
    limit = timedelta(seconds=PATIENCE)
    if kind == "TCP":
        first = distributed.TCPStore("localhost", 0, is_master=True, timeout=limit)
        return [first, *(first.clone() for _ in range(NUM_RANKS - 1))]
    if kind == "file":
        path = tempfile.mkdtemp() + "/store"
        return [distributed.FileStore(path, NUM_RANKS) for _ in range(NUM_RANKS)]
    store = distributed.HashStore()
    store.set_timeout(limit)
    return [store] * NUM_RANKS


def train(store, rank, told_in, reduced, result):
    """Run steps like DistributedDataParallel: a step ends only after all ranks have begun it."""
    last = LastStep(store, "", rank, NUM_RANKS)
    is_told = False
    stopped = None
    for step in range(1, NUM_STEPS + 1):
        is_told |= told_in == (step, "before")
        reduced.wait(PATIENCE)
        is_told |= told_in == (step, "after")
        if last.is_reached(step, is_requested=is_told):
            stopped = step
            break
    last.close()
    result[rank] = (step, stopped)


def outcome(told, kind="hash"):
    """Train on all ranks; return each rank's number of steps, and the step that stopped it."""
    # Keep all stores until the end: the first rank's store serves the stores of the other ranks.
    shared, reduced, result = stores(kind), threading.Barrier(NUM_RANKS), {}
    threads = [
        threading.Thread(target=train, args=(store, rank, told.get(rank), reduced, result))
        for rank, store in enumerate(shared)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sorted(result) == list(range(NUM_RANKS)), "deadlock"
    return list(result.values())


MOMENTS = st.tuples(st.integers(1, NUM_STEPS), st.sampled_from(["before", "after"]))


@given(told=st.dictionaries(st.integers(0, NUM_RANKS - 1), MOMENTS))
@settings(max_examples=60)
@example(told={0: (1, "before")})
@example(told={2: (NUM_STEPS, "after")})
@example(told=dict.fromkeys(range(NUM_RANKS), (2, "before")))
def test_all_ranks_stop_after_the_same_step(told):
    """All ranks stop after the step in which the first SIGTERM came, or after the next one."""
    results = outcome(told)

    assert len(set(results)) == 1
    done, stopped = results[0]
    first = min((step for step, _ in told.values()), default=NUM_STEPS + 1)
    assert done in {min(first, NUM_STEPS), min(first + 1, NUM_STEPS)}
    assert stopped in {None, done}
    if done < NUM_STEPS:
        assert stopped == done


@pytest.mark.parametrize("kind", ["TCP", "file"])
@pytest.mark.parametrize("told", [{}, {0: (2, "before")}, {2: (2, "after")}])
def test_stores(kind, told):
    """Ranks agree on the last step through each kind of store that torch uses to start ranks."""
    results = outcome(told, kind)

    assert len(set(results)) == 1
    assert results[0][0] in ({2, 3} if told else {NUM_STEPS})


def test_a_rank_that_has_ended_answers():
    """A rank that receives a SIGTERM late does not wait for a rank that has ended."""
    first, last = (
        LastStep(store := distributed.HashStore(), "a/", 0, 2),
        LastStep(store, "a/", 1, 2),
    )
    assert not last.is_reached(7, is_requested=False)
    last.close()

    assert not first.is_reached(7, is_requested=True)
    assert first.is_reached(8, is_requested=True)
    first.close()


def test_a_rank_that_has_died(monkeypatch):
    """A rank that does not answer is named, and nobody waits for it for long."""
    monkeypatch.setattr(termination, "_SECONDS_FOR_ANSWERS", 0.05)
    first = LastStep(distributed.HashStore(), "a/", 0, 3)

    assert not first.is_reached(7, is_requested=False)
    with pytest.raises(RuntimeError, match=r"ranks 1 and 2 did not answer .* without saving"):
        first.is_reached(8, is_requested=True)
    first.close()


def test_a_store_that_is_lost_at_a_signal():
    """If the process that hosts the store has died, the error is that of any rank that died."""
    with pytest.warns(UserWarning, match="lost the connection"):
        last = with_lost_store()

    with pytest.raises(RuntimeError, match=r"hosts .* store .* probably died; .* without saving"):
        last.is_reached(1, is_requested=True)


LOST = distributed.DistNetworkError("connection reset")


class LostStore:
    """A store whose process has ended."""

    def check(self, _keys):
        """Raise the error of a lost store."""
        raise LOST

    def set(self, _key, _value):
        """Raise the error of a lost store."""
        raise LOST


def with_lost_store():
    """Return a `LastStep` whose thread has lost its store."""
    last = LastStep(LostStore(), "", 0, 2)
    last._thread.join(PATIENCE)
    return last


def test_a_store_that_is_lost():
    """A lost store causes a warning, and the training continues."""
    with pytest.warns(UserWarning, match="a signal at another rank .*: connection reset"):
        last = with_lost_store()

    assert not last.is_reached(1, is_requested=False)
    last.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_one_process(number):
    """With one process, the step in which a signal comes is the last one."""
    with RankTermination() as ending:
        assert not ending.stops_after(1)
        assert not ending.is_stopping
        tell_to_end(number)
        assert ending.stops_after(2)
        assert ending.is_stopping
        assert ending.conclude(CPU)


def test_a_signal_during_a_save():
    """With one process, a signal during a save stops the run after that save."""
    with RankTermination() as ending:
        assert not ending.stops_after(1)
        assert not ending.stops_after_save()
        tell_to_end()
        assert ending.stops_after_save()
        assert ending.is_stopping


def test_a_signal_in_an_earlier_block():
    """A SIGTERM in an earlier block does not stop the training in a later block."""
    ending = RankTermination()
    with ending:
        tell_to_end()
        assert ending.stops_after(1)
    with ending:
        assert not ending.is_stopping
        assert not ending.stops_after(1)
        assert not ending.conclude(CPU)


def test_a_signal_after_the_last_step():
    """A SIGTERM after the last step is still reported at the end."""
    with RankTermination() as ending:
        assert not ending.stops_after(1)
        tell_to_end()
        assert not ending.is_stopping
        assert ending.conclude(CPU)


@pytest.mark.parametrize("concludes", [True, False])
def test_the_handler_is_restored(concludes):
    """The former handler is back when the block has ended or `conclude` was called."""
    before = signal.getsignal(signal.SIGTERM)
    with RankTermination() as ending:
        assert signal.getsignal(signal.SIGTERM) != before
        if concludes:
            ending.conclude(CPU)
            assert signal.getsignal(signal.SIGTERM) == before

    assert signal.getsignal(signal.SIGTERM) == before


def test_the_first_signal_is_noted():
    """The block continues after the first SIGTERM, and the flag is set."""
    with StopFlag() as flag:
        assert not flag.is_set
        tell_to_end()
        went_on = flag.is_set

    assert went_on
    assert flag.is_set


def test_each_block_begins_anew():
    """The flag is cleared at the start of a block."""
    flag = StopFlag()
    with flag:
        tell_to_end()
    with flag:
        assert not flag.is_set


@pytest.mark.parametrize(
    "before", [signal.SIG_IGN, signal.SIG_DFL, lambda *_: None], ids=["ignored", "default", "own"]
)
def test_the_flag_restores_the_handler(before):
    """The former handler is back after the block, also if the block raises."""
    at_first = signal.signal(signal.SIGTERM, before)
    try:
        with pytest.raises(KeyError), StopFlag():
            raise KeyError

        assert signal.getsignal(signal.SIGTERM) == before
    finally:
        signal.signal(signal.SIGTERM, at_first)


def test_a_handler_that_was_set_meanwhile_stays():
    """A handler that other code sets within the block is still there after the block."""
    at_first = signal.getsignal(signal.SIGTERM)
    try:
        with StopFlag():
            signal.signal(signal.SIGTERM, signal.SIG_IGN)

        assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, at_first)


def test_the_other_signal_after_the_first():
    """SIGTERM after SIGUSR1 does not end the process: Slurm sends both, some time apart."""
    with StopFlag() as flag:
        tell_to_end(signal.SIGUSR1)
        tell_to_end(signal.SIGTERM)

        assert flag.is_set


def test_sigusr1_that_other_code_handles():
    """SIGUSR1 goes to the handler that other code has set."""
    received = []
    before = signal.signal(signal.SIGUSR1, lambda *_: received.append(1))
    try:
        with StopFlag() as flag:
            tell_to_end(signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert (received, flag.is_set) == ([1], False)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells of handlers in C")
def test_sigusr1_that_c_code_handles(tmp_path):
    """SIGUSR1 goes to a handler in C, which Python does not know of, also after the block."""
    dumps = tmp_path / "dumps"
    with dumps.open("w") as file:
        faulthandler.register(signal.SIGUSR1, file)
        try:
            with exiting_when_stopped(), StopFlag() as flag:
                tell_to_end(signal.SIGUSR1)
            tell_to_end(signal.SIGUSR1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)

    assert (dumps.read_text().count("Current thread"), flag.is_set) == (2, False)


def test_a_signal_between_two_blocks(monkeypatch):
    """A signal at the very end of a block does not reset its handler in the next block."""
    reset, join = queue.SimpleQueue(), threading.Thread.join
    monkeypatch.setattr(termination, "_SECONDS_OF_COPIES", 0.0)
    monkeypatch.setattr(termination, "_set_c_handler", lambda number, _: reset.put(number))
    flag = StopFlag()
    with monkeypatch.context() as patch, flag:
        patch.setattr(threading.Thread, "join", lambda thread: (join(thread), tell_to_end()))
    assert flag.is_set
    with flag:
        tell_to_end(signal.SIGUSR1)

        assert reset.get(timeout=PATIENCE) == signal.SIGUSR1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_outside_of_a_training(number):
    """The process exits with 75; within a training, the training decides."""
    before = signal.getsignal(number)
    with exiting_when_stopped():
        with StopFlag() as flag:
            tell_to_end(number)
        assert flag.is_set
        with pytest.raises(SystemExit) as caught:
            tell_to_end(number)

    assert caught.value.code == 75
    assert signal.getsignal(number) == before


def test_in_another_thread():
    """Outside the main thread, the block does nothing and raises nothing."""
    handler = signal.getsignal(signal.SIGTERM)
    found = []

    def run() -> None:
        with StopFlag() as flag:
            found.extend([signal.getsignal(signal.SIGTERM), flag.is_set])

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()

    assert found == [handler, False]
    assert signal.getsignal(signal.SIGTERM) is handler


TOLD_TWICE = """
import os, signal, sys
from mfwrap import termination
from mfwrap.termination import StopFlag

termination._SECONDS_OF_COPIES = 0.0 if "inside" in sys.argv else 60.0

def tell_to_end():
    os.kill(os.getpid(), signal.SIGTERM)

with StopFlag() as flag:
    tell_to_end()
    print("first", flush=True)
    if sys.argv[1] == "copy":
        tell_to_end()
    while sys.argv[1] == "inside":
        tell_to_end()
    print("second", flush=True)
tell_to_end()
print("after", flush=True)
"""


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize(
    ("second", "printed"),
    [("inside", "first\n"), ("copy", "first\nsecond\n"), ("", "first\nsecond\n")],
)
def test_the_second_signal_ends_the_process(second, printed):
    """A repeated SIGTERM or one after the block ends the process; a copy of the first does not."""
    command = [sys.executable, "-c", TOLD_TWICE, second]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ended.stderr == ""
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, printed)


IN_LONG_CALL = """
import ctypes, os, signal
from mfwrap import termination
from mfwrap.termination import StopFlag

termination._SECONDS_OF_COPIES = 0.0
with StopFlag():
    os.kill(os.getpid(), signal.SIGTERM)
    os.write(1, b"waiting\\n")
    while True:  # a call into C that, like those of torch, releases the interpreter lock
        ctypes.CDLL(None).pause()
"""


def test_the_second_signal_within_a_long_call():
    """A repeated SIGTERM ends the process within a call into C that never returns."""
    command = [sys.executable, "-c", IN_LONG_CALL]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "waiting\n"
        try:
            assert told_until_it_ends(process) == -signal.SIGTERM
        finally:
            process.kill()


@pytest.fixture
def _python_handles_ctrl_c():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_python_handles_ctrl_c")
def test_ctrl_c():
    """The first Ctrl-C sets the flag, the second raises, and the handler is restored."""
    with StopFlag() as flag:
        tell_to_end(signal.SIGINT)
        assert (flag.is_set, flag.is_terminated) == (True, False)
        with pytest.raises(KeyboardInterrupt):
            tell_to_end(signal.SIGINT)

    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("_python_handles_ctrl_c")
def test_a_copy_of_ctrl_c(monkeypatch):
    """Under torchrun, a second Ctrl-C may be torchrun's copy, and only a later one raises."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    with StopFlag():
        tell_to_end(signal.SIGINT)
        tell_to_end(signal.SIGINT)
        monkeypatch.setattr(termination, "_SECONDS_OF_COPIES", -1.0)
        with pytest.raises(KeyboardInterrupt):
            tell_to_end(signal.SIGINT)


@pytest.mark.usefixtures("_python_handles_ctrl_c")
@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda *_: None])
def test_another_handler_of_ctrl_c(handler):
    """A handler of other code stays, as does that of a process in the background."""
    signal.signal(signal.SIGINT, handler)
    with StopFlag() as flag:
        tell_to_end(signal.SIGINT)

    assert not flag.is_set
    assert signal.getsignal(signal.SIGINT) == handler


@pytest.mark.usefixtures("_python_handles_ctrl_c")
@pytest.mark.parametrize(
    ("numbers", "is_interrupted"),
    [([signal.SIGINT], True), ([signal.SIGINT, signal.SIGTERM], False), ([], False)],
)
def test_what_has_stopped_a_training(numbers, is_interrupted):
    """A training counts as interrupted if Ctrl-C has stopped it, and no other signal."""
    with RankTermination() as ranks:
        for number in numbers:
            tell_to_end(number)
        assert ranks.conclude(CPU) == bool(numbers)

    assert ranks.is_interrupted == is_interrupted
