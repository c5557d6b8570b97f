"""Notice that files of a checkpoint are deleted or replaced while a training loads it.

A checkpoint is verified first and loaded afterwards, by several libraries. In between another
program may delete it, for example because it is old. The libraries take some missing files for
files that were never written, and continue with a fresh optimizer.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mfwrap.checkpoints.file_formats import DamagedFileError


class Identity(NamedTuple):
    """What is the same as long as nobody replaces or changes a file."""

    device: int
    inode: int
    num_bytes: int
    changed_at: int
    """Time of the last change of the content, in nanoseconds."""


def identity(path: Path) -> Identity:
    """Return the identity of a file.

    The file is opened: a network file system may answer ``stat`` from a cache, but not ``open``.

    Raises:
        OSError: If the file cannot be opened.
    """
    with path.open("rb", buffering=0) as file:
        status = os.fstat(file.fileno())
    return Identity(status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)


def check_unchanged(folder: Path, verified: Mapping[str, Identity]) -> None:
    """Check that the files of a checkpoint are still those that were verified.

    Args:
        folder: Folder of the checkpoint.
        verified: Identities of its files, by name.

    Raises:
        DamagedFileError: If a file is missing, or is another one.
    """
    for name, expected in verified.items():
        try:
            found = identity(folder / name)
        except FileNotFoundError:
            found = None
        if found != expected:
            does = "deleted" if found is None else "changed"
            reason = f"was {does} by another program while the checkpoint was being loaded"
            raise DamagedFileError(folder / name, reason)
