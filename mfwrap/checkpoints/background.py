"""Write a checkpoint in a thread of its own while the training goes on."""

import atexit
import logging
import threading
from collections.abc import Callable
from typing import final

_LOG = logging.getLogger(__name__)


@final
class BackgroundWriter:
    """Run one function at a time in a thread, and raise its error in the thread that asks.

    The thread is not a daemon: Python waits for it before the process ends. An error that nobody
    has asked for by then is logged.
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def is_running(self) -> bool:
        """Whether the function has not returned yet."""
        return self._thread is not None and self._thread.is_alive()

    def submit(self, write: Callable[[], None]) -> None:
        """Wait for the last function, raise its error if there is one, and start another one.

        Args:
            write: Function that the thread calls. It must not start a collective of a group that
                another thread uses.

        Raises:
            Exception: Error of the last function.
        """
        self.wait()
        self._thread = threading.Thread(target=self._run, args=(write,), name="mfwrap-checkpoint")
        atexit.register(self._log_error)
        self._thread.start()

    def wait(self) -> None:
        """Wait for the function, if there is one, and raise its error.

        Raises:
            Exception: Error of the function, only once.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        atexit.unregister(self._log_error)
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:  # noqa: BLE001  (`wait` raises it)
            self._error = error

    def _log_error(self) -> None:
        if self._error is not None:
            _LOG.error("a checkpoint could not be written: %s", self._error)

    def __reduce__(self) -> tuple[type["BackgroundWriter"], tuple[()]]:
        # A pickled trainer has a thread of its own.
        return type(self), ()
