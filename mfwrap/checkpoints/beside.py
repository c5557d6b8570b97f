"""Let other people's code write beside a checkpoint that is being written in a temporary folder.

A ``_save_checkpoint`` of the user's own, or a hook of ``save_state``, may take the parent of the
checkpoint for the run folder: append to a file there, replace one, or set a link ``latest``. While
the checkpoint is written, this parent is a temporary folder. So the files and links of the run
folder are there, too, as hard links: what is appended to them is appended to the files themselves.
Folders of the run folder are not.
"""

import contextlib
import os
import shutil
from pathlib import Path

from mfwrap.checkpoints.written_files import LIST, begin_list


def show_files(folder: Path, staging: Path) -> None:
    """Show the files and links of a run folder in a temporary folder.

    Begins the list of the temporary folder, by which a later save knows it after a kill.

    Args:
        folder: Run folder, which may be missing.
        staging: Temporary folder.
    """
    begin_list(staging, ())
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name.startswith("_"):  # of mfwrap itself
            continue
        # A file system may have no links. A file may have gone.
        with contextlib.suppress(OSError):
            if path.is_symlink():
                (staging / path.name).symlink_to(path.readlink())
            elif path.is_file():
                (staging / path.name).hardlink_to(path)


def move_back(staging: Path, folder: Path, *, but: str) -> None:
    """Move what has been written beside a checkpoint to the run folder.

    Args:
        staging: Temporary folder; removed if nothing is left in it.
        folder: Run folder, which is created.
        but: Name of the checkpoint.
    """
    if not staging.is_dir():
        return  # nodes share the disk, and another one has moved it
    for path in [each for each in staging.iterdir() if each.name not in {but, LIST}]:
        folder.mkdir(parents=True, exist_ok=True)
        final = folder / path.name
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, final, dirs_exist_ok=True, symlinks=True)
            shutil.rmtree(path)
        elif os.path.lexists(final) and os.path.samestat(path.lstat(), final.lstat()):
            path.unlink()
        else:
            path.replace(final)
    if not (staging / but).exists():
        (staging / LIST).unlink(missing_ok=True)
    with contextlib.suppress(OSError):
        staging.rmdir()
