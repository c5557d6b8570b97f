"""Name the file and the reason when a file cannot be written."""

import contextlib
import errno
import io
import os
import re
import shutil
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from safetensors import SafetensorError

_OS_ERROR = re.compile(r"\(os error (\d+)\)|Os \{ code: (\d+)")
"""The errno inside a message of safetensors, whose version 0.5 writes the second form."""

_TORCH = re.compile(r"inline_container\.cc|PytorchStreamWriter|iostream error")
"""Errors of ``torch.save``: of its writer of zip files, and of the C++ stream below it."""

_ENFORCE = re.compile(r"^\[enforce fail at [^\]]*\] \. ")


@contextlib.contextmanager
def naming_written_file(folder: Path) -> Iterator[None]:
    """Within the block, turn each error of writing a file into an ``OSError`` that names the file.

    Three kinds of errors say too little: if a write or a sync fails, the errors of Python and of
    safetensors do not name the file, and the ``RuntimeError`` of ``torch.save`` gives no reason.
    The raised error has both: ``[Errno 28] No space left on device: 'run/model/a.pt'``. All other
    errors pass unchanged.

    Args:
        folder: Folder that the block writes to. The error names the folder if the file is unknown.

    Raises:
        OSError: If a file in `folder` cannot be written.
    """
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = _reason(error, folder)
        if reason is None:
            raise
        raise OSError(*reason, str(_written_file(error.__traceback__, folder))) from error


def _reason(error: Exception, folder: Path) -> tuple[int, str] | None:
    """Return errno and text of a write error; ``None`` for any other error."""
    if isinstance(error, OSError):
        if error.errno is None or error.filename is not None:
            return None
        return error.errno, str(error.strerror)
    if isinstance(error, SafetensorError):
        match = _OS_ERROR.search(str(error))
        number = 0 if match is None else int(match[1] or match[2])
        return (number, os.strerror(number)) if number else None
    if not _TORCH.search(str(error)):
        return None
    # torch does not keep the errno. The cause is often a full disk, so give its free space.
    first = _ENFORCE.sub("", str(error).partition("\n")[0])
    free = shutil.disk_usage(folder).free
    return errno.EIO, f"torch.save failed ({first}); the disk has {free:,} free bytes"


def _written_file(raised: TracebackType | None, folder: Path) -> Path:
    """Return the file that the innermost function of a traceback was writing.

    That function holds the file, or its path, in a local variable: ``f`` of ``torch.save``,
    ``filename`` of safetensors' ``save_file``, or the file that a ``with`` block has opened.
    """
    found = folder
    for frame, _ in traceback.walk_tb(raised):
        for value in list(frame.f_locals.values()):
            path = getattr(value, "name", None) if isinstance(value, io.IOBase) else value
            if isinstance(path, (str, Path)) and _is_file_in(Path(path), folder):
                found = Path(path)
    return found


def _is_file_in(path: Path, folder: Path) -> bool:
    return path != folder and path.is_relative_to(folder) and not path.is_dir()
