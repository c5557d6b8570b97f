"""Start the commands of docs/how-to/launch.md, in a folder with a small recipe."""

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Self

import psutil
import yaml

from support.paths import ROOT
from support.recipe_texts import recipe_text

__all__ = [
    "FILES",
    "PAGE",
    "Launched",
    "end_of",
    "environment",
    "is_served",
    "start",
    "wait_until",
    "write_recipe",
]

PAGE = ROOT / "docs" / "how-to" / "launch.md"
FILES = ROOT / "docs" / "how-to" / "launch"
TIMEOUT_SECONDS = 480
"""Time limit of one training; long enough for a slow machine."""


def write_recipe(folder: Path, **training) -> None:
    """Write a small recipe under the name that the page uses, for the machine's own devices."""
    recipe = yaml.safe_load(recipe_text(training={"save_strategy": "steps", **training}))
    del recipe["training"]["use_cpu"]
    text = yaml.safe_dump(recipe, sort_keys=False)
    (folder / "causal_lm.yaml").write_text(text, encoding="utf-8")


def environment() -> dict[str, str]:
    """Return the environment of a shell in which this Python's environment is active."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1"}


class Launched(NamedTuple):
    """A command that was started; the end of a ``with`` block kills it."""

    process: subprocess.Popen[bytes]
    output: Path
    """File that gets what the command prints."""

    def kill(self) -> None:
        """Kill the command and all processes that it has started, unless the command has ended."""
        if self.process.poll() is None:
            command = psutil.Process(self.process.pid)
            for each in (command, *command.children(recursive=True)):
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            self.process.wait()

    def __enter__(self) -> Self:
        """Return the command."""
        return self

    def __exit__(self, *_: object) -> None:
        """Kill the command."""
        self.kill()


def start(command: Sequence[str], folder: Path, **variables: str) -> Launched:
    """Start a command in a folder, with these variables added to the environment."""
    output = folder / f"output_{len([*folder.glob('output_*')])}.txt"
    with output.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment() | variables, stdout=file, stderr=file
        )
    return Launched(process, output)


def end_of(started: Sequence[Launched]) -> str:
    """Wait for commands, require that all of them succeed, and return their output."""

    def codes() -> list[int | None]:
        return [each.process.poll() for each in started]

    def printed() -> str:
        return "\n".join(each.output.read_text(encoding="utf-8") for each in started)

    try:
        # If one command has failed, the others may wait for it.
        wait_until(lambda: None not in codes() or any(codes()), TIMEOUT_SECONDS, printed)
        assert codes() == [0] * len(started), printed()[-6000:]
        return printed()
    finally:
        for each in started:
            each.kill()


def is_served(port: int) -> bool:
    """Return whether a process on this machine accepts connections at a port."""
    with socket.socket() as client:
        return client.connect_ex(("localhost", port)) == 0


def wait_until(is_reached: Callable[[], bool], seconds: float, what: Callable[[], str]) -> None:
    """Poll until a condition holds; fail with a description after so many seconds."""
    end = time.monotonic() + seconds
    while not is_reached():
        assert time.monotonic() < end, what()
        time.sleep(0.1)
