"""Checksums cover exactly the given bytes, in the given order."""

import hashlib
import os

import pytest

from mfwrap.checkpoints import checksums as module
from mfwrap.checkpoints.checksums import Extent, checksum, checksums, whole_extent

BLOCK = 1 << 20


@pytest.mark.parametrize("size", [0, 1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_a_whole_file(tmp_path, size):
    """The checksum of a file is the output of ``sha256sum``, at any number of blocks."""
    content = os.urandom(size)
    (tmp_path / "file").write_bytes(content)
    extent = whole_extent(tmp_path / "file")

    assert extent.num_bytes == size
    assert checksum(extent) == hashlib.sha256(content).hexdigest()


def test_a_part_of_a_file(tmp_path):
    """Bytes before and after the range do not count."""
    content = os.urandom(2 * BLOCK)
    (tmp_path / "file").write_bytes(content)
    first, size = 100, BLOCK + 5

    found = checksum(Extent(tmp_path / "file", first, size))

    assert found == hashlib.sha256(content[first : first + size]).hexdigest()


def test_a_file_that_ends_early(tmp_path):
    """A file that is truncated while it is read gets another checksum instead of a hang."""
    (tmp_path / "file").write_bytes(b"abc")

    assert checksum(Extent(tmp_path / "file", 1, 10)) == hashlib.sha256(b"bc").hexdigest()


def test_a_file_that_cannot_be_read(tmp_path):
    """An error of the operating system reaches the caller, also from a thread."""
    (tmp_path / "file").write_bytes(b"abc")
    extents = [whole_extent(tmp_path / "file"), Extent(tmp_path / "missing", 0, 1)]

    with pytest.raises(FileNotFoundError):
        list(checksums(extents))


@pytest.mark.parametrize("num_cores", [1, 4])
def test_the_order(tmp_path, monkeypatch, num_cores):
    """Checksums come in the order of the ranges, with one thread or several."""
    monkeypatch.setattr(module, "num_cores", lambda: num_cores)
    content = os.urandom(BLOCK)
    (tmp_path / "file").write_bytes(content)
    # The first ranges are the longest, so they end last if threads work at the same time.
    places = [(0, BLOCK), (10, BLOCK // 2), *((start, 7) for start in range(20))]

    found = checksums(Extent(tmp_path / "file", start, size) for start, size in places)

    expected = [hashlib.sha256(content[start : start + size]) for start, size in places]
    assert list(found) == [each.hexdigest() for each in expected]
