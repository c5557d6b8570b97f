"""Small folders, an interruption of what writes them, and a look at what is left."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mfwrap.checkpoints.whole import staging_folder

__all__ = [
    "NAME",
    "WHOLE",
    "Interrupted",
    "checkpoint",
    "contents",
    "fill",
    "interrupt",
    "names",
    "staged",
]

NAME = "checkpoint-2"
CHANGES = ("rename", "replace", "rmdir", "unlink", "mkdir", "fsync")
"""All functions of ``os`` that change names on the disk or sync it."""

WHOLE = {
    content: {"model.bin": content, "state.json": content, "part/notes.txt": content}
    for content in ("old", "new")
}


class Interrupted(Exception):  # noqa: N818  (stands for a kill, not for an error)
    """Raised where a test kills the process."""


def checkpoint(folder: Path, content: str = "new") -> Path:
    """Write a checkpoint with files and a folder, and return its folder."""
    folder.mkdir(parents=True)
    return fill(folder, content)


def fill(folder: Path, content: str = "new") -> Path:
    """Write the files of a checkpoint into an empty folder, and return the folder."""
    (folder / "part").mkdir()
    for name in ("model.bin", "state.json", "part/notes.txt"):
        (folder / name).write_text(content)
    return folder


def staged(final: Path, content: str = "new") -> Path:
    """Write the files of a checkpoint into its staging folder, and return the folder."""
    return checkpoint(staging_folder(final) / final.name, content)


def contents(folder: Path) -> dict[str, str]:
    """Return the text of each file of a folder by name."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def names(folder: Path) -> list[str]:
    """Return the names in a folder."""
    return sorted(path.name for path in folder.iterdir())


def interrupt(patch: pytest.MonkeyPatch, number: int) -> list[str]:
    """Patch all functions that change the disk so that call `number` and later calls raise.

    Calls are counted from 0.

    Returns:
        List to which each call that raises appends the name of its function.
    """
    interrupted: list[str] = []
    left = [number]

    def replace(name: str, change: Callable[..., Any]) -> None:
        def changed(*args: Any, **keywords: Any) -> Any:
            left[0] -= 1
            if left[0] < 0:
                interrupted.append(name)
                raise Interrupted
            return change(*args, **keywords)

        patch.setattr(os, name, changed)

    for name in CHANGES:
        replace(name, getattr(os, name))
    return interrupted
