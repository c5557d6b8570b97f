"""Write files and folders that are complete or absent, even if the process or the power fails."""

import contextlib
import errno
import os
import re
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from mfwrap.checkpoints.locks import PARTIAL, lock_of, naming_folder, owning, owning_if_free
from mfwrap.checkpoints.write_errors import naming_written_file
from mfwrap.checkpoints.written_files import LIST, note_written

OWN_PARTIAL = rf"\.[0-9a-f]{{16}}{re.escape(PARTIAL)}"
"""Pattern of what `whole_file` adds to the name of a file while it writes the file."""

REMOVED = "removed"
"""Name of the folder, inside a staging folder, of what is being deleted."""

_REPLACED = "replaced"
_SECONDS_OF_A_WRITE = 3600.0
"""Age from which a temporary file counts as left behind by a process that was killed."""


@contextlib.contextmanager
def whole_file(path: Path, *, must_be_listed: bool = True) -> Iterator[Path]:
    """Write a file under a temporary name, then rename it: readers never see a half-written file.

    After the ``with`` block the file is synced to disk and renamed to `path`, and the folder is
    synced. If the block raises, the temporary file is deleted and an older file at `path` stays. If
    the process is killed, `path` is the complete older or new file, and a temporary file may be
    left. A call an hour later deletes it.

    Args:
        path: File to write or replace. Missing folders are created.
        must_be_listed: Whether it is an error if this user must not add the file to the list of a
            run folder. ``False`` for a file that mfwrap recognizes by its content.

    Yields:
        Temporary path in the same folder, which the block must write. It is an empty file that this
        call has created under a random name.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}{PARTIAL}")
    # With O_EXCL an existing file or link is an error: whoever can write to the folder cannot make
    # this process write to a file of their choice.
    os.close(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        _remove_left_files(path, partial.stat().st_mtime - _SECONDS_OF_A_WRITE)
        with naming_written_file(partial):
            yield partial
        sync(partial)
        with contextlib.suppress(*([] if must_be_listed else [PermissionError])):
            note_written(path)
        partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise
    sync(path.parent)


def _remove_left_files(path: Path, before: float) -> None:
    """Delete old temporary files of `path`; a young one may belong to another process."""
    own = re.compile(re.escape(path.name) + OWN_PARTIAL)
    for left in [each for each in path.parent.iterdir() if own.fullmatch(each.name)]:
        # Another process may delete or rename the file just now.
        with contextlib.suppress(FileNotFoundError):
            status = left.lstat()
            if stat.S_ISREG(status.st_mode) and status.st_mtime < before:
                left.unlink()


@contextlib.contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Write a folder under a temporary name, then rename it to `folder`, replacing an older one.

    After the ``with`` block `move_into_place` syncs and renames the folder. If the block raises,
    the temporary folder is deleted and the older folder stays. If the process is killed, `folder`
    is the complete older or new folder. There is one exception: replacing an older folder takes two
    renames, and between them `folder` is missing. If the process is killed there, the next call for
    `folder`, or `complete_move`, puts the new folder in place.

    Args:
        folder: Folder to write or replace.

    Yields:
        Empty temporary folder, which the block fills.

    Raises:
        BlockingIOError: If another program is writing the folder.
        FileExistsError: If the name of the temporary folder is taken.
    """
    with owning(lock_of(folder)):
        complete_move(folder)
        staging = staging_folder(folder)
        clear_staging(staging)
        written = staging / folder.name
        written.mkdir(parents=True)
        try:
            with naming_written_file(written):
                yield written
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
        move_into_place(written, folder)


def staging_folder(folder: Path) -> Path:
    """Return the folder in which `folder` lies while it is being written, replaced or deleted.

    Each folder has its own, so that two programs may write folders in the same parent folder. Its
    name begins with an underscore, so the Trainer does not push it to the Hub.
    """
    return folder.with_name(f"_{folder.name}{PARTIAL}")


def clear_staging(staging: Path) -> None:
    """Delete what a killed process has left in a staging folder.

    Raises:
        FileExistsError: If somebody else has written it.
    """
    if os.path.lexists(staging):
        if not is_own_staging(staging):
            msg = f"{staging} is in the way: mfwrap has not written it; rename it"
            raise FileExistsError(msg)
        shutil.rmtree(staging, ignore_errors=True)


def is_own_staging(staging: Path) -> bool:
    """Return whether a staging folder has only what mfwrap puts there, or has a list."""
    own = {staging.name.removeprefix("_").removesuffix(PARTIAL), _REPLACED, REMOVED}
    try:
        if not stat.S_ISDIR(staging.lstat().st_mode):
            return False
        names = {path.name for path in staging.iterdir()}
    except FileNotFoundError:
        return True  # if nodes share the disk, another node has deleted it just now
    return names <= own or LIST in names


def move_into_place(written: Path, final: Path) -> None:
    """Sync a folder to disk and rename it to `final`, replacing an older folder.

    If the process is killed during the call, `final` is the complete older or new folder, or it is
    missing and `complete_move` puts the new folder in place.

    Args:
        written: Complete folder inside its own staging folder, with the name of `final`.
        final: Path that the folder gets.
    """
    _sync_all(written)
    note_written(final)
    staging = written.parent
    if final.exists():
        replaced = staging / _REPLACED / final.name
        shutil.rmtree(replaced, ignore_errors=True)
        replaced.parent.mkdir(parents=True, exist_ok=True)
        final.rename(replaced)
    written.rename(final)
    sync(final.parent)
    shutil.rmtree(staging, ignore_errors=True)


def move_files_into_place(written: Path, final: Path, *, first: str, last: str) -> None:
    """Sync a folder to disk and move its files into an existing folder, whose other files stay.

    If the process is killed during the call, the file `last` is missing in `final`.

    Args:
        written: Complete folder on the disk of `final`.
        final: Folder that gets the files. Files of the same name are replaced.
        first: Start of the names of files that are moved before all others.
        last: Name of the file that is deleted first and moved last.
    """
    _sync_all(written)
    (final / last).unlink(missing_ok=True)
    sync(final)
    files = sorted(each for each in written.rglob("*") if each.is_file())
    for path in sorted(files, key=lambda each: not each.name.startswith(first)):
        place = final / path.relative_to(written)
        if place != final / last:
            place.parent.mkdir(parents=True, exist_ok=True)
            path.replace(place)
            sync(place.parent)
    (written / last).replace(final / last)
    sync(final)


def is_replaceable(folder: Path) -> bool:
    """Return whether `move_into_place` can replace a folder, which may be missing.

    It cannot replace a link, a mount point, a folder that contains the current folder, or a folder
    in a folder without write permission.
    """
    if folder.is_symlink() or folder.is_mount():
        return False
    if folder.exists() and not folder.is_dir():
        return False
    found = folder.absolute().parent
    while not found.exists():
        found = found.parent
    return os.access(found, os.W_OK) and not Path.cwd().is_relative_to(folder.resolve())


def complete_move(final: Path) -> None:
    """Finish a `move_into_place` that was killed between its two renames.

    Does nothing if another program owns the folder or its parent folder: the move then goes on.
    """
    staging = staging_folder(final)
    replaced = staging / _REPLACED / final.name
    if not replaced.exists() or final.exists():
        return
    with owning_if_free(final) as is_free:
        for folder in (staging / final.name, replaced) if is_free else ():
            # Another process may have renamed the folder just now.
            if folder.exists() and not final.exists():
                with contextlib.suppress(FileNotFoundError):
                    folder.rename(final)


def being_replaced(parent: Path) -> list[Path]:
    """Return the folders in `parent` that `move_into_place` is replacing, or was when killed."""
    found = parent.glob(f"_*{PARTIAL}/{_REPLACED}/*")
    folders = [parent / each.name for each in found]
    return [each for each in folders if staging_folder(each).is_dir()]


def adopt_files(written: Path, final: Path) -> None:
    """Move this node's files of a checkpoint into place, if the node has a disk of its own.

    Call this function on nodes where no process calls `move_into_place`, and only after the saving
    process on another node has called `move_into_place`. If the nodes share a disk,
    `move_into_place` has already moved `written`, and this function does nothing.

    Args:
        written: Checkpoint folder inside its staging folder.
        final: Path that the checkpoint gets. Files of the same name are replaced; others stay.
    """
    try:
        _sync_all(written)
        if final.exists():
            for path in [each for each in written.rglob("*") if each.is_file()]:
                place = final / path.relative_to(written)
                place.parent.mkdir(parents=True, exist_ok=True)
                path.replace(place)
        else:
            note_written(final)
            written.rename(final)
    except FileNotFoundError:
        # The nodes share a disk, and another node has moved the files already. This node's cached
        # view of the disk can still list the moved files, so `exists` cannot replace this handler.
        return
    _sync_all(final)
    sync(final.parent)
    shutil.rmtree(written.parent, ignore_errors=True)


def check_writable(folder: Path) -> None:
    """Create a folder if it is missing, and check that files can be written to it.

    Raises:
        OSError: If the folder cannot be created or written to. The message names the folder and
            the reason.
    """
    with naming_folder(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass


def _sync_all(folder: Path) -> None:
    """Sync a folder, and all files and folders in it, to disk."""
    for path in sorted(folder.rglob("*")):
        sync(path)
    sync(folder)


def sync(path: Path) -> None:
    """Sync a file to disk, or the names of the files in a folder."""
    # Do not sync on Windows, which can sync neither a folder nor a file that is open for reading.
    if sys.platform == "win32":
        return
    opened = os.open(path, os.O_RDONLY)
    try:
        os.fsync(opened)
    except OSError as error:
        # Some network file systems cannot sync a folder; their renames reach the disk on their own.
        if error.errno != errno.EINVAL or not path.is_dir():
            raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(opened)
