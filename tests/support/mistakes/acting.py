"""Act a mistake out in an empty folder, and keep what its maker sees."""

import contextlib
import importlib
import io
import logging
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import transformers
from accelerate.state import AcceleratorState, GradientState

from support.mistakes.table import Mistake

__all__ = ["Answer", "act"]

_MODULES = {
    "command": "recipes",
    "recipe": "recipes",
    "trainer": "trainers",
    "accelerate": "loops",
    "loop": "loops",
}
"""Module with the function that acts a mistake out, by its way into mfwrap."""

_LOGGERS = ("", "transformers", "huggingface_hub", "datasets")
"""Loggers whose messages a user sees. Those of the libraries do not reach the root."""


_BESIDE = re.compile("deprecated|has new PAD/BOS/EOS tokens")
"""Messages of transformers that are not about the mistake."""


class Answer(NamedTuple):
    """What the maker of a mistake gets."""

    ends: str
    """``exit`` and its code, the name of an exception, ``warning``, or ``nothing``."""

    says: str
    """The sentence of the error, or the warnings; paths are relative to the folder."""


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not _BESIDE.search(message := record.getMessage()):
            self.messages.append(message)


def act(mistake: Mistake, folder: Path) -> Answer:
    """Act a mistake out.

    Args:
        mistake: The mistake.
        folder: Empty folder, which is the current one meanwhile.
    """
    program = getattr(
        importlib.import_module(f"support.mistakes.{_MODULES[mistake.way]}"), mistake.id
    )
    _reset()
    with contextlib.chdir(folder), _captured() as (printed, warned):
        try:
            program()
        except SystemExit as left:
            if left.code:
                ends, says = f"exit {left.code}", _last_sentence(printed.getvalue())
            else:
                ends, says = _unless_warned([*_warnings_of(printed.getvalue()), *warned])
        except Exception as error:  # noqa: BLE001  (whatever the mistake leads to)
            notes = getattr(error, "__notes__", ())
            ends, says = type(error).__name__, "; ".join([str(error), *notes])
        else:
            ends, says = _unless_warned(warned)
    _reset()
    return Answer(ends, _relative(says, folder))


def _reset() -> None:
    torch.manual_seed(0)
    transformers.logging.set_verbosity_warning()
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextlib.contextmanager
def _captured() -> Iterator[tuple[io.StringIO, list[str]]]:
    """Collect what is printed to standard error, and the texts of warnings and of loggers."""
    printed, handler = io.StringIO(), _Messages()
    loggers = [logging.getLogger(name) for name in _LOGGERS]
    for logger in loggers:
        logger.addHandler(handler)
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(printed),
        ):
            warnings.simplefilter("always")
            # Of the libraries, for those who write them.
            warnings.simplefilter("ignore", FutureWarning)
            warnings.simplefilter("ignore", DeprecationWarning)
            warnings.showwarning = lambda message, *_: handler.messages.append(str(message))
            yield printed, handler.messages
    finally:
        for logger in loggers:
            logger.removeHandler(handler)


def _unless_warned(warned: list[str]) -> tuple[str, str]:
    return ("warning", " ".join(dict.fromkeys(warned))) if warned else ("nothing", "")


def _warnings_of(printed: str) -> list[str]:
    """Return the warnings and the alarms that the command line has printed."""
    words = ("warning", "diverg", "unhealthy", "nan", "inf", "skipped")
    return [
        line
        for line in printed.splitlines()
        if line.startswith("mfwrap: ") and any(word in line.lower() for word in words)
    ]


def _last_sentence(printed: str) -> str:
    """Return the last line that the command line has printed, with the warnings before it."""
    lines = [line for line in printed.splitlines() if line.startswith("mfwrap: ")]
    return lines[-1] if lines else printed.strip()


def _relative(text: str, folder: Path) -> str:
    """Return a text on one line, without the parts that differ from run to run."""
    for path in (folder, folder.resolve()):
        text = text.replace(f"{path}/", "")
    text = re.sub(r"/\S*/mfwrap-\w+/?|\x1b\[[\d;]*m|(?<=127\.0\.0\.1):\d+", "", text)
    return " ".join(text.split())
