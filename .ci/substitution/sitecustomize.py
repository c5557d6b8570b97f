"""Record what accelerate prepares, and attach the training step to every accelerator.

Python imports a module of this name when it starts. `peers.py` puts this folder on the path of the
tests that it runs, so that all processes that the tests start do the same. Settings are environment
variables:

- ``MFWRAP_PEERS_ATTACH``: "1" to attach each accelerator as soon as it is constructed, "0" to leave
  accelerate as it is.
- ``MFWRAP_PEERS_RECORD``: File to which each process appends a JSON object for each accelerator,
  prepared optimizer and prepared scheduler: its kind, and the names of its class and base classes.
"""

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import Accelerator


def record(kind: str, held: object) -> None:
    """Append an object's kind and the names of its classes to the record."""
    classes = [f"{each.__module__}.{each.__qualname__}" for each in type(held).__mro__]
    line = {"kind": kind, "classes": classes}
    with Path(os.environ["MFWRAP_PEERS_RECORD"]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


def constructed(construct: Callable[..., None]) -> Callable[..., None]:
    """Return ``Accelerator.__init__`` that attaches the step and records the accelerator."""

    @functools.wraps(construct)
    def construct_and_attach(self: Accelerator, *args: Any, **keywords: Any) -> None:
        construct(self, *args, **keywords)
        if os.environ["MFWRAP_PEERS_ATTACH"] == "1":
            from mfwrap.accelerate import attach

            attach(self)
        record("accelerator", self)

    return construct_and_attach


def prepared(prepare: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``Accelerator.prepare`` that records the prepared optimizers and schedulers."""

    @functools.wraps(prepare)
    def prepare_and_record(self: Accelerator, *args: Any, **keywords: Any) -> Any:
        before = [*self._optimizers, *self._schedulers]
        made = prepare(self, *args, **keywords)
        for kind, held in (("optimizer", self._optimizers), ("scheduler", self._schedulers)):
            for each in held:
                if not any(each is known for known in before):
                    record(kind, each)
        return made

    return prepare_and_record


Accelerator.__init__ = constructed(Accelerator.__init__)
Accelerator.prepare = prepared(Accelerator.prepare)
