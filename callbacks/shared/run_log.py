"""Logger and standard output of the callbacks."""

import logging
import sys

_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"


def run_logger(name: str) -> logging.Logger:
    """Return a logger whose messages of level INFO are written, even if logging is not configured.

    Levels that the user has set for ``mfwrap`` or ``mfwrap.callbacks`` stay. If no handler is
    configured, ``mfwrap`` gets one that writes to standard output in MindFormers' format. This
    handler is silent as soon as the root logger has a handler of its own.

    Call this when there is something to log, not at import: an import must not configure logging.

    Args:
        name: ``__name__`` of a module of `mfwrap.callbacks`; inside a package of it
            ``__package__``, because users filter by this name and modules may be split.
    """
    library, callbacks = logging.getLogger("mfwrap"), logging.getLogger("mfwrap.callbacks")
    if library.level == callbacks.level == logging.NOTSET:
        callbacks.setLevel(logging.INFO)
    logger = logging.getLogger(name)
    if not logger.hasHandlers():
        library.addHandler(_standard_output())
    return logger


def _standard_output() -> logging.Handler:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter(_FORMAT))
    # Records also propagate to the root logger: its handlers would print each a second time.
    handler.addFilter(lambda _: not logging.getLogger().handlers)
    return handler


def print_line(line: str) -> None:
    """Write a line to the current ``sys.stdout`` and flush it, as ``print(line, flush=True)``."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
