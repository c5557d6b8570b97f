"""Files of a checkpoint that are deleted or replaced after their verification are noticed."""

import os
import shutil

import pytest

from mfwrap.checkpoints.file_formats import DamagedFileError
from mfwrap.checkpoints.identities import check_unchanged
from mfwrap.checkpoints.verification import check_checkpoint
from support.checkpoint_folders import write_checkpoint


def delete(path):
    """Delete a file."""
    path.unlink()


def rewrite(path):
    """Write the same content again."""
    content = path.read_bytes()
    path.write_bytes(content)
    os.utime(path, (1, 1))


def replace(path):
    """Put a copy with the same content and time in the place of a file."""
    shutil.copy2(path, path.with_suffix(".copy"))
    path.with_suffix(".copy").replace(path)


@pytest.mark.parametrize("listed", [False, True])
@pytest.mark.parametrize(
    ("change", "reason"), [(delete, "deleted"), (rewrite, "changed"), (replace, "changed")]
)
def test_a_file_that_is_another_one(tmp_path, listed, change, reason):
    """The error names the file and says whether it was deleted or changed."""
    folder = write_checkpoint(tmp_path / "checkpoint-1", listed=listed)
    verified = check_checkpoint(folder).identities
    check_unchanged(folder, verified)

    change(folder / "optimizer.pt")

    with pytest.raises(DamagedFileError, match=rf"optimizer\.pt was {reason} by another program"):
        check_unchanged(folder, verified)


def test_files_that_have_been_added(tmp_path):
    """Further files do not matter."""
    folder = write_checkpoint(tmp_path / "checkpoint-1")
    verified = check_checkpoint(folder).identities

    (folder / "notes.txt").write_text("mine")

    check_unchanged(folder, verified)


def test_a_checkpoint_that_vanishes(tmp_path):
    """So is a whole folder that was deleted or renamed."""
    folder = write_checkpoint(tmp_path / "checkpoint-1")
    verified = check_checkpoint(folder).identities

    folder.rename(tmp_path / "_abandoned-checkpoint-1")

    with pytest.raises(DamagedFileError, match="was deleted by another program"):
        check_unchanged(folder, verified)
