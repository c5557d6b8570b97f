"""Stop a training when the process is told to end, after the step that it is in."""

import signal
import threading
from types import FrameType, TracebackType
from typing import Any, Self, final

__all__ = ["Termination"]


@final
class Termination:
    """Within a ``with`` block, note the first SIGTERM; the second one ends the process at once.

    Signals can be handled in the main thread only; in any other the block changes nothing.
    """

    def __init__(self) -> None:
        self.is_requested = False
        """Whether the process has been told to end."""
        self._before: Any = None

    def __enter__(self) -> Self:
        self.is_requested = False
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGTERM, self._receive)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._before is not None:
            signal.signal(signal.SIGTERM, self._before)
            self._before = None

    def _receive(self, number: int, frame: FrameType | None) -> None:
        del frame
        self.is_requested = True
        # The second one must not wait for Python: a long call into torch may be running.
        signal.signal(number, signal.SIG_DFL)
