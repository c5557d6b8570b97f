"""List what a run has written in its folder, so that nothing else is deleted or replaced.

The list has one name per line, of a file or folder in the run folder. A name is added before the
file gets it, so a run that is killed at any moment has all its files in the list. Each rank adds
names to a list of its own, because on network file systems two machines that append to one file at
the same time overwrite each other's lines.
"""

import contextlib
import os
import secrets
import threading
from collections.abc import Iterable
from pathlib import Path

from mfwrap.checkpoints.locks import PARTIAL
from mfwrap.checkpoints.write_errors import naming_written_file
from mfwrap.collectives import this_rank

LIST = "_mfwrap_files.txt"
"""Name of rank 0's list in a run folder; that of another rank is ``_mfwrap_files_rank<rank>.txt``.
"""

_CHANGING = threading.RLock()
"""Held while a list is changed: a checkpoint may be written in a thread of its own."""

_RANK_LISTS = "_mfwrap_files_rank*.txt"


def begin_list(folder: Path, names: Iterable[str]) -> None:
    """Begin the list of a run folder with names that it has already; keep a list that is there."""
    if listed_names(folder) is not None:
        return
    own, text = _own_list(folder), _lines(names)
    folder.mkdir(parents=True, exist_ok=True)
    # Unlike a rename, neither replaces a list that another program has begun meanwhile.
    with contextlib.suppress(FileExistsError):
        if not text:  # whole at once, and a process that is killed leaves nothing else
            _write(own, text, os.O_CREAT | os.O_EXCL)
            return
        partial = _partial_list(folder, text)
        try:
            own.hardlink_to(partial)
        except FileExistsError:
            pass
        except OSError:  # a file system without links
            _write(own, text, os.O_CREAT | os.O_EXCL)
        finally:
            partial.unlink(missing_ok=True)


def rewrite_list(folder: Path, names: Iterable[str]) -> None:
    """Write the list of a run folder anew, or begin it; it replaces those of all ranks."""
    _partial_list(folder, _lines(names)).replace(folder / LIST)
    for path in folder.glob(_RANK_LISTS):
        path.unlink(missing_ok=True)


def drop_unused_list(folder: Path) -> None:
    """Delete the list that this rank has begun if no file in it is there."""
    if not any(os.path.lexists(folder / name) for name in listed_names(folder) or ()):
        _own_list(folder).unlink(missing_ok=True)


def drop_listed(path: Path) -> None:
    """Take what is deleted from this rank's list: a later file of the name may be the user's."""
    own = _own_list(path.parent)
    with _CHANGING:
        if own.exists():
            kept = (_names_in(own) or set()) - {path.name}
            _partial_list(path.parent, _lines(kept)).replace(own)


def note_written(path: Path) -> None:
    """Add a new file or folder to the list, if the folder that it is in has one.

    Call it before the file or folder gets its name. One that exists belongs to somebody else, or is
    in the list already.
    """
    if not os.path.lexists(path):
        list_own(path)


def list_own(path: Path) -> None:
    """Add a file or folder that a run has written to the list, if the folder has one."""
    with _CHANGING:
        names = listed_names(path.parent)
        if names is not None and path.name not in names:
            own = _own_list(path.parent)
            content = own.read_bytes() if own.exists() else b""
            end = "" if content.endswith(b"\n") or not content else "\n"
            _write(own, end + _lines([path.name]), os.O_CREAT | os.O_APPEND)


def listed_names(folder: Path) -> set[str] | None:
    """Return the names in the lists of a folder; ``None`` if it has no list.

    A line that is not UTF-8 is the name of a file whose name is not UTF-8 either.
    """
    found = [_names_in(path) for path in (folder / LIST, *folder.glob(_RANK_LISTS))]
    lists = [names for names in found if names is not None]
    return set().union(*lists) if lists else None


def _names_in(own: Path) -> set[str] | None:
    try:
        text = own.read_text("utf-8-sig", "surrogateescape")
    except FileNotFoundError:
        return None
    # Text mode has made "\n" of the "\r\n" of an editor. `splitlines` knows other ends of lines.
    return {name for name in text.split("\n") if name}


def _own_list(folder: Path) -> Path:
    rank = this_rank()
    return folder / (LIST if rank == 0 else _RANK_LISTS.replace("*", str(rank)))


def _lines(names: Iterable[str]) -> str:
    return "".join(f"{name}\n" for name in sorted(set(names)))


def _partial_list(folder: Path, text: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{LIST}.{secrets.token_hex(8)}{PARTIAL}"
    _write(partial, text, os.O_CREAT | os.O_EXCL)
    return partial


def _write(path: Path, text: str, flags: int) -> None:
    opened = os.open(path, os.O_WRONLY | flags, 0o666)
    try:
        with naming_written_file(path):
            rest = text.encode("utf-8", "surrogateescape")
            while rest:
                rest = rest[os.write(opened, rest) :]
            os.fsync(opened)
    finally:
        os.close(opened)
