"""Keep the workers of a data loader alive when a launcher asks a whole process group to end."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

from torch.utils.data import DataLoader

from mfwrap.termination import is_free

_SECONDS_BETWEEN_CHECKS = 1.0


def leave_signals_to_parent(loader: Any) -> None:
    """Make the workers of a data loader ignore SIGUSR1, SIGINT, and SIGTERM of other processes.

    torchrun and Slurm send these signals to the workers, too, as does Ctrl-C in a terminal. If a
    worker ended, the data loader would raise an error in the training process before its step and
    its checkpoint are done. The workers still end if the training process sends them SIGTERM, and
    within a second after the training process has ended. Where other code in the worker handles
    SIGUSR1, such as ``faulthandler``, its handler stays.

    Does nothing on a platform without ``sigtimedwait``, such as macOS.

    Args:
        loader: Data loader of torch or accelerate, whose next workers are changed; any other object
            is left as it is.
    """
    base = getattr(loader, "base_dataloader", loader)
    if isinstance(base, DataLoader):
        base.worker_init_fn = worker_start(base)


def worker_start(loader: "DataLoader[Any]") -> Callable[[int], None] | None:
    """Return the function that `leave_signals_to_parent` gives a data loader for its workers.

    It is the loader's own function on a platform without ``sigtimedwait``.
    """
    own = loader.worker_init_fn
    if isinstance(own, WorkerStart) or not hasattr(signal, "sigtimedwait"):
        return own
    return WorkerStart(own)


@final
@dataclass(frozen=True)
class WorkerStart:
    """Function that a data loader calls in each worker when the worker starts.

    Attributes:
        user_function: The user's or the Trainer's function, which is called with the worker's
            number; ``None`` without one.
    """

    user_function: Callable[[int], None] | None

    def __call__(self, worker_id: int) -> None:
        """Ignore signals, watch for SIGTERM in a thread, and call the user's function."""
        # A worker that is forked has the handler of its training process, which does nothing in the
        # worker, but gives programs that the worker starts the default action. A worker that is
        # spawned has the default action, which ends it.
        for number in (signal.SIGUSR1, signal.SIGINT):
            if is_free(number):
                signal.signal(number, signal.SIG_IGN)
        # torch's own handler for SIGTERM, set before this call, ends the worker whoever has sent
        # the signal. A Python handler would not learn the sender. Block the signal instead, so that
        # a thread can receive it together with the number of the sender.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_wait, name="mfwrap-worker-signals", daemon=True).start()
        if self.user_function is not None:
            self.user_function(worker_id)


def _wait() -> None:
    """End this process when the training process sends SIGTERM or has ended."""
    # The start method "forkserver" forks workers from its server, which ends with the training.
    training, forked_by = multiprocessing.parent_process(), os.getppid()
    while os.getppid() == forked_by:
        received = signal.sigtimedwait({signal.SIGTERM}, _SECONDS_BETWEEN_CHECKS)
        if received is not None and training is not None and received.si_pid == training.pid:
            break
    os._exit(0)
