"""An error of writing a file names the file and the reason."""

import errno
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mfwrap.checkpoints.write_errors import naming_written_file
from support.versions import needs

FULL = Path("/dev/full")
"""A device on which each write fails as on a full disk."""

pytestmark = pytest.mark.skipif(not FULL.exists(), reason=f"needs {FULL}")


def text(path):
    """Write a text with Python's own file."""
    with path.open("w") as file:
        file.write("text")


def tensors(path):
    """Write a tensor with torch."""
    torch.save({"a": torch.zeros(8)}, path)


def safe_tensors(path):
    """Write a tensor with safetensors, which cannot create its file."""
    save_file({"a": torch.zeros(8)}, path / "a.safetensors")


@pytest.mark.parametrize(
    ("write", "name", "says"),
    [
        (text, "a", r"\[Errno 28\] No space left on device: '{}'"),
        pytest.param(
            tensors,
            "a",
            r"torch.save failed \(.+\); the disk has [\d,]+ free bytes: '{}'",
            marks=needs("torch", "2.11", "it raises no error at the last bytes of a file"),
        ),
        (safe_tensors, "a/a.safetensors", r"\[Errno 20\] Not a directory: '{}'"),
    ],
)
def test_the_file_and_the_reason(tmp_path, write, name, says):
    """Whatever writes a file, an error names the file and the reason in one line."""
    (tmp_path / "a").symlink_to(FULL)

    with pytest.raises(OSError, match=says.format(tmp_path / name)), naming_written_file(tmp_path):
        write(tmp_path / "a")


def test_an_unknown_file(tmp_path):
    """If no function of the traceback holds the path of the file, the error names the folder."""
    with (
        pytest.raises(OSError, match=f"No space left on device: '{tmp_path}'"),
        naming_written_file(tmp_path),
    ):
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    "error", [RuntimeError("overflow"), FileNotFoundError(2, "No such file", "b"), ValueError("c")]
)
def test_other_errors(tmp_path, error):
    """An error that is not about writing, or that names its file, is unchanged."""
    with pytest.raises(type(error)) as caught, naming_written_file(tmp_path):
        raise error

    assert caught.value is error
