"""Compute checksums of files, and of ranges of bytes within files, on several threads."""

import hashlib
import os
import sys
from collections.abc import Generator, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

_BLOCK = 1 << 20
_MAX_THREADS = 8


class Extent(NamedTuple):
    """A range of bytes of a file."""

    path: Path
    start: int
    num_bytes: int


def whole_extent(path: Path) -> Extent:
    """Return all bytes of a file."""
    return Extent(path, 0, path.stat().st_size)


def checksum(extent: Extent) -> str:
    """Return the SHA-256 checksum of a range of bytes, as hexadecimal digits.

    The file is read in blocks into a buffer, not mapped into memory: if the disk fails, reading
    raises OSError, whereas access to mapped memory would end the process with a signal.

    Raises:
        OSError: If the file cannot be read.
    """
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(min(extent.num_bytes, _BLOCK)))
    with extent.path.open("rb", buffering=0) as file:
        file.seek(extent.start)
        rest = extent.num_bytes
        # If the file ends early, hash only the bytes that exist: the checksum then differs from
        # the expected one.
        while rest and (count := file.readinto(buffer[: min(rest, _BLOCK)])):
            digest.update(buffer[:count])
            rest -= count
    return digest.hexdigest()


def checksums(extents: Iterable[Extent]) -> Generator[str]:
    """Yield the checksums of several ranges of bytes, in the same order.

    Reading and hashing release Python's global lock, so up to eight threads work at the same time.
    If the iterator is closed early, ranges that no thread has begun are not read.
    """
    extents = list(extents)
    with ThreadPoolExecutor(min(_MAX_THREADS, num_cores())) as pool:
        try:
            found = pool.map(checksum, extents)
        except RuntimeError:
            # Python is ending and waits for this thread: a pool takes no more work.
            found = map(checksum, extents)
        yield from found


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    if sys.platform == "linux":
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
