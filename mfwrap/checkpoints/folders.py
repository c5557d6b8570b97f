"""Checkpoint folders that are moved and removed as wholes, whenever the process or power ends."""

import contextlib
import os
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = [
    "adopt_files",
    "complete_move",
    "move_into_place",
    "remove_checkpoints",
    "staging_folder",
    "sync_folder",
]

_REPLACED = "replaced"
_REMOVED = "removed"


def staging_folder(run_folder: Path) -> Path:
    """Return the folder beside checkpoints in which one is written, and old ones are deleted."""
    return run_folder / "checkpoint.partial"


def sync_folder(folder: Path) -> None:
    """Wait until all files below a folder, and their names, are on the disk."""
    for path in sorted(folder.rglob("*")):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    # Windows cannot do this to a folder, nor to a file that is open for reading.
    if sys.platform != "win32":
        opened = os.open(path, os.O_RDONLY)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)


def move_into_place(written: Path, final: Path) -> None:
    """Put a checkpoint that is written, and on the disk, where it belongs, in place of another.

    Whenever the process ends, one of the two is whole under that name, or `complete_move` finds the
    new one.

    Args:
        written: Lies in the staging folder, under the same name.
        final: Where it belongs.
    """
    run_folder = final.parent
    if final.exists():
        replaced = staging_folder(run_folder) / _REPLACED / final.name
        shutil.rmtree(replaced, ignore_errors=True)
        replaced.parent.mkdir(parents=True, exist_ok=True)
        final.rename(replaced)
    written.rename(final)
    _sync(run_folder)
    shutil.rmtree(staging_folder(run_folder), ignore_errors=True)


def complete_move(run_folder: Path) -> None:
    """Put a checkpoint where it belongs if a process ended when the old one was moved away."""
    staging = staging_folder(run_folder)
    for replaced in (staging / _REPLACED).glob("*"):
        final = run_folder / replaced.name
        if not final.exists():
            # Of several nodes that share a disk, one is the first.
            with contextlib.suppress(FileNotFoundError):
                (staging / replaced.name).rename(final)


def adopt_files(written: Path, final: Path) -> None:
    """Put what a node has written that has a disk of its own, but no process that saves, in place.

    Called when the process that saves has moved the checkpoint: where nodes share a disk, nothing
    is left to do.
    """
    try:
        sync_folder(written)
        if final.exists():
            for path in [each for each in written.rglob("*") if each.is_file()]:
                place = final / path.relative_to(written)
                place.parent.mkdir(parents=True, exist_ok=True)
                path.replace(place)
        else:
            written.rename(final)
    except FileNotFoundError:
        # A node's view of a shared disk can be late; the disk itself knows.
        return
    sync_folder(final)
    _sync(final.parent)
    shutil.rmtree(staging_folder(final.parent), ignore_errors=True)


def remove_checkpoints(folders: Iterable[Path], run_folder: Path) -> None:
    """Delete checkpoints; a part of one never bears its name."""
    removed = staging_folder(run_folder) / _REMOVED
    shutil.rmtree(removed, ignore_errors=True)
    for folder in folders:
        removed.mkdir(parents=True, exist_ok=True)
        folder.rename(removed / folder.name)
    shutil.rmtree(removed, ignore_errors=True)
    with contextlib.suppress(OSError):
        # Unless something else lies in it.
        removed.parent.rmdir()
