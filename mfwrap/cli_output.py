"""What the commands of the command line say and write."""

import os
from collections.abc import Sequence
from pathlib import Path

import click

from mfwrap.recipe.document import RecipeError

__all__ = ["is_first_process", "say", "warn_of", "write_new"]


def write_new(file: Path, text: str) -> None:
    """Write a text to a file that is not there yet.

    Raises:
        RecipeError: If it is there, or cannot be written.
    """
    try:
        with file.open("x", encoding="utf-8") as new:
            new.write(text)
    except OSError as error:
        msg = f"{file}: must be a new file, got one that cannot be written: {error.strerror}"
        raise RecipeError(msg) from error


def warn_of(name: str, notes: Sequence[str]) -> None:
    """Say notes on a file, a line each."""
    for note in notes:
        say(f"warning: {name}: {note}")


def say(line: str) -> None:
    """Write a line to standard error, from the first process alone."""
    if is_first_process():
        click.echo(f"mfwrap: {line}", err=True)


def is_first_process() -> bool:
    """Return whether this is the process that speaks, of those that a launcher has started."""
    return os.environ.get("RANK", "0") == "0"
