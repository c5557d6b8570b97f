"""Workers of a prepared data loader end with their training, and at no signal of a launcher."""

import faulthandler
import os
import pickle
import signal
import subprocess

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

from mfwrap.accelerate import attach
from mfwrap.accelerate.data_workers import WorkerStart, leave_signals_to_parent
from mfwrap.termination import StopFlag

STARTED = []
"""Numbers of the workers that the user's function was called with, in this process."""


class WorkerIds(Dataset):
    """Rows with the process id of the worker that reads them."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index):
        return torch.tensor([os.getpid(), len(STARTED)])


class IgnoredSignals(WorkerIds):
    """Rows that say whether the worker that reads them ignores SIGUSR1."""

    def __getitem__(self, index):
        return torch.tensor(signal.getsignal(signal.SIGUSR1) == signal.SIG_IGN)


def prepared(rows=None):
    """Return a data loader with one worker, prepared by an attached accelerator."""
    accelerator = Accelerator(cpu=True)
    attach(accelerator)
    # Workers of Python 3.14's start method cannot import a test file, which has no module's name.
    loader = DataLoader(
        rows or WorkerIds(),
        num_workers=1,
        worker_init_fn=STARTED.append,
        multiprocessing_context="fork",
    )
    return accelerator.prepare(loader)


@pytest.mark.parametrize("name", ["TERM", "USR1"])
def test_a_signal_of_a_launcher(name):
    """A worker survives a signal of another process, and the user's function was called."""
    rows = []
    for row in prepared():
        if not rows:
            subprocess.run(["kill", f"-{name}", str(int(row[0, 0]))], check=True)
        rows.append(row)

    assert len(rows) == len(WorkerIds())
    assert {int(row[0, 1]) for row in rows} == {1}


def test_a_handler_of_other_code(tmp_path):
    """A handler that the training process has for SIGUSR1 still works in a worker."""
    with (tmp_path / "stacks.txt").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file, all_threads=False)
        try:
            for number, row in enumerate(prepared()):
                if number == 0:
                    os.kill(int(row[0, 0]), signal.SIGUSR1)
        finally:
            faulthandler.unregister(signal.SIGUSR1)

    assert "_worker_loop" in (tmp_path / "stacks.txt").read_text()


def test_a_signal_that_the_training_records():
    """A forked worker ignores SIGUSR1, so that programs which it starts do so, too."""
    with StopFlag():
        rows = list(prepared(IgnoredSignals()))

    assert all(row.item() for row in rows)


def test_a_signal_of_the_training():
    """A worker ends when the process that has started it terminates it, as torch does at last."""
    rows = iter(prepared())
    worker = int(next(rows)[0, 0])
    os.kill(worker, signal.SIGTERM)

    ended = os.waitid(os.P_PID, worker, os.WEXITED | os.WNOWAIT)
    assert (ended.si_code, ended.si_status) == (os.CLD_EXITED, 0)


def test_a_loader_that_is_prepared_again():
    """The function of the workers is wrapped once, and reaches workers that are spawned."""
    loader = DataLoader(WorkerIds(), num_workers=1, worker_init_fn=print)
    for _ in range(2):
        leave_signals_to_parent(loader)

    assert loader.worker_init_fn == WorkerStart(print)
    assert pickle.dumps(loader.worker_init_fn)


def test_other_loaders():
    """Data that is not a data loader of torch is left as it is."""
    leave_signals_to_parent(rows := [1, 2])

    assert rows == [1, 2]
