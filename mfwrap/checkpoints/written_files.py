"""List what a run has written in its folder, so that nothing else is deleted or replaced.

The list has one name per line, of a file or folder in the run folder. A name is added before the
file gets it, so a run that is killed at any moment has all its files in the list. Several ranks,
and commands such as ``mfwrap report``, may add names at the same time.
"""

import contextlib
import os
import secrets
from collections.abc import Iterable
from pathlib import Path

from mfwrap.checkpoints.locks import PARTIAL
from mfwrap.checkpoints.write_errors import naming_written_file

LIST = "_mfwrap_files.txt"
"""Name of the list in a run folder."""


def begin_list(folder: Path, names: Iterable[str]) -> None:
    """Begin the list of a run folder with names that it has already; keep a list that is there."""
    names = set(names)
    if (folder / LIST).exists():
        return
    if not names:
        folder.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            _write(folder / LIST, "", os.O_CREAT | os.O_EXCL)
        return
    partial = _partial_list(folder, names)
    try:
        # Unlike a rename, a link does not replace the list that another rank has begun meanwhile.
        (folder / LIST).hardlink_to(partial)
    except FileExistsError:
        pass
    except OSError:  # a file system without links
        partial.replace(folder / LIST)
    partial.unlink(missing_ok=True)


def rewrite_list(folder: Path, names: Iterable[str]) -> None:
    """Write the list of a run folder anew, or begin it."""
    _partial_list(folder, names).replace(folder / LIST)


def _partial_list(folder: Path, names: Iterable[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{LIST}.{secrets.token_hex(8)}{PARTIAL}"
    _write(partial, "".join(f"{name}\n" for name in sorted(names)), os.O_CREAT | os.O_EXCL)
    return partial


def note_written(path: Path) -> None:
    """Add a new file or folder to the list, if the folder that it is in has one.

    Call it before the file or folder gets its name. One that exists belongs to somebody else, or is
    in the list already.
    """
    if not os.path.lexists(path):
        list_own(path)


def list_own(path: Path) -> None:
    """Add a file or folder that a run has written to the list, if the folder has one."""
    names = listed_names(path.parent)
    if names is not None and path.name not in names:
        _write(path.parent / LIST, f"{path.name}\n", os.O_APPEND)


def _write(path: Path, text: str, flag: int) -> None:
    opened = os.open(path, os.O_WRONLY | flag, 0o666)
    try:
        with naming_written_file(path):
            os.write(opened, text.encode())
            os.fsync(opened)
    finally:
        os.close(opened)


def listed_names(folder: Path) -> set[str] | None:
    """Return the names in the list of a folder; ``None`` if it has no list."""
    try:
        text = (folder / LIST).read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    return set(filter(None, text.split("\n")))  # `splitlines` knows other ends of lines, too
