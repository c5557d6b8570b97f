"""The log that the callbacks print to."""

import logging
import sys

__all__ = [
    "print_line",
    "run_logger",
]


_FORMAT = "%(asctime)s - %(name)s - %(levelname)s - %(message)s"


def run_logger(name: str) -> logging.Logger:
    """Return the logger of a module, heard at level INFO.

    Call it when there is something to say, not at import. A level that was set for ``mfwrap`` or
    ``mfwrap.callbacks`` stays. Where nobody has configured logging, ``mfwrap`` gets a handler
    that writes to standard output, lines that begin as MindFormers' do; it keeps silent once
    the root logger has a handler of its own.

    Args:
        name: ``__name__`` of a module of `mfwrap.callbacks`, or ``__package__`` inside a package:
            a filter that a user sets by name must survive when a module is split.
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
    # Records propagate, so a handler of the root would print each a second time.
    handler.addFilter(lambda _: not logging.getLogger().handlers)
    return handler


def print_line(line: str) -> None:
    """Write a line to standard output, now.

    To whatever stands there at the moment of the call, as ``print`` does.
    """
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()
