"""Write the callbacks' messages to the log and to standard output."""

import logging
import sys
from typing import final

_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"


def run_logger(name: str) -> logging.Logger:
    """Return a logger whose messages of level INFO are written, even if logging is not configured.

    Levels that the user has set for ``mfwrap`` or ``mfwrap.callbacks`` stay. If no handler is
    configured, ``mfwrap`` gets one that writes to standard output in MindFormers' format. This
    handler is silent as soon as the root logger has a handler of its own.

    Call this when there is something to log, not at import: an import must not configure logging.

    Args:
        name: Name of the logger: ``__package__`` of the calling module, or ``__name__`` if the
            module is directly in `mfwrap.callbacks`. Users filter by this name, so it should not
            change when a module of a subpackage is split.
    """
    library, callbacks = logging.getLogger("mfwrap"), logging.getLogger("mfwrap.callbacks")
    if library.level == callbacks.level == logging.NOTSET:
        callbacks.setLevel(logging.INFO)
    logger = logging.getLogger(name)
    if not logger.hasHandlers():
        library.addHandler(_standard_output())
    return logger


@final
class WarnOnce:
    """Log warnings, each text only once.

    Args:
        name: Name of the logger, see `run_logger`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._logged: set[str] = set()

    def __call__(self, text: str) -> None:
        """Log a warning, unless this object has logged the same text before."""
        if text not in self._logged:
            self._logged.add(text)
            run_logger(self._name).warning("%s", text)


def _standard_output() -> logging.Handler:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(_FORMAT))
    # Records also propagate to the root logger. If the root logger has handlers, they print each
    # record, so this handler must not print the record a second time.
    handler.addFilter(lambda _: not logging.getLogger().handlers and not _has_bar())
    return handler


def _has_bar() -> bool:
    """Return whether `MFTrainer` shows a progress bar and writes the records above it."""
    return any(handler.name == "mfwrap-bar" for handler in logging.getLogger("mfwrap").handlers)


def print_line(line: str) -> None:
    """Write a line to the current ``sys.stdout`` and flush it, as ``print(line, flush=True)``."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
