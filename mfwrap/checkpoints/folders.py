"""Files and folders that a reader finds whole or not at all, whenever the process or power ends."""

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

PARTIAL = ".partial"
"""End of the name of everything that is still being written, replaced or deleted."""

_REPLACED = "replaced"
_REMOVED = "removed"


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Write a file under a temporary name, then rename it: readers never see a half-written file.

    After the ``with`` block the file is synced to disk, renamed to `path`, and the name is synced.
    If the block raises, the temporary file is deleted and an older file at `path` stays. A process
    that is killed leaves the older file or the new one, and at most a temporary file beside it,
    which the next call overwrites.

    Args:
        path: File to write or replace. Missing folders are created.

    Yields:
        Temporary path in the same folder, which the block must write.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + PARTIAL)
    try:
        yield partial
        _sync(partial)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    _sync(path.parent)


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Write a folder under a temporary name, then rename it, in place of an older one if any.

    After the ``with`` block `move_into_place` syncs and renames the folder. If the block raises,
    the temporary folder is deleted and the older folder stays. A process that is killed leaves the
    older folder or the new one. The one exception is a kill between the two renames that replace
    an older folder: then the next call for this folder, or `complete_move`, puts the new one in
    place.

    Args:
        folder: Folder to write or replace.

    Yields:
        Temporary folder, empty, which the block fills.
    """
    complete_move(folder.parent)
    written = staging_folder(folder.parent) / folder.name
    shutil.rmtree(written, ignore_errors=True)
    written.mkdir(parents=True)
    try:
        yield written
    except BaseException:
        shutil.rmtree(written, ignore_errors=True)
        _remove_if_empty(written.parent)
        raise
    move_into_place(written, folder)


def staging_folder(parent: Path) -> Path:
    """Return the folder for everything in `parent` that is being written, replaced or deleted.

    It is the only such folder, so deleting it removes all that killed processes have left.
    """
    return parent / f"checkpoint{PARTIAL}"


def move_into_place(written: Path, final: Path) -> None:
    """Sync a folder to disk and rename it to its final name, in place of an older one if any.

    If the process ends meanwhile, the older or the new folder is whole under that name, or
    `complete_move` finds the new one.

    Args:
        written: Folder with the final name, inside the staging folder of ``final.parent``.
        final: Where it belongs.
    """
    _sync_all(written)
    parent = final.parent
    if final.exists():
        replaced = staging_folder(parent) / _REPLACED / final.name
        shutil.rmtree(replaced, ignore_errors=True)
        replaced.parent.mkdir(parents=True, exist_ok=True)
        final.rename(replaced)
    written.rename(final)
    _sync(parent)
    shutil.rmtree(staging_folder(parent), ignore_errors=True)


def complete_move(parent: Path) -> None:
    """Finish a `move_into_place` that ended after the old folder had been moved away."""
    staging = staging_folder(parent)
    for replaced in (staging / _REPLACED).glob("*"):
        final = parent / replaced.name
        if not final.exists():
            # On a disk that several nodes share, another node may have just renamed it.
            with contextlib.suppress(FileNotFoundError):
                (staging / replaced.name).rename(final)


def adopt_files(written: Path, final: Path) -> None:
    """Put a node's files in place, on a node with a disk of its own and no process that saves.

    Called after the process that saves has moved its checkpoint. If the nodes share a disk,
    `written` is gone by then and nothing is done.

    Args:
        written: Checkpoint folder inside the staging folder.
        final: Where it belongs. Files of the same name are replaced, others stay.
    """
    try:
        _sync_all(written)
        if final.exists():
            for path in [each for each in written.rglob("*") if each.is_file()]:
                place = final / path.relative_to(written)
                place.parent.mkdir(parents=True, exist_ok=True)
                path.replace(place)
        else:
            written.rename(final)
    except FileNotFoundError:
        # This node's cached view of a shared disk can still list files that were moved away.
        return
    _sync_all(final)
    _sync(final.parent)
    shutil.rmtree(staging_folder(final.parent), ignore_errors=True)


def remove_checkpoints(folders: Iterable[Path], run_folder: Path) -> None:
    """Delete checkpoints; each is renamed first, so that no half-deleted one looks whole."""
    removed = staging_folder(run_folder) / _REMOVED
    shutil.rmtree(removed, ignore_errors=True)
    for folder in folders:
        removed.mkdir(parents=True, exist_ok=True)
        folder.rename(removed / folder.name)
    shutil.rmtree(removed, ignore_errors=True)
    _remove_if_empty(removed.parent)


def _remove_if_empty(folder: Path) -> None:
    with contextlib.suppress(OSError):
        folder.rmdir()


def _sync_all(folder: Path) -> None:
    """Wait until all files below a folder, and their names, are on the disk."""
    for path in sorted(folder.rglob("*")):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    # Windows cannot sync a folder, nor a file that is open for reading only.
    if sys.platform == "win32":
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        # Some network file systems cannot sync a folder; their renames reach the disk on their own.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise
    finally:
        os.close(opened)
