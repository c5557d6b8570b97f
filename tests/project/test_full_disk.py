"""A disk that fills up while `mfwrap train` writes a checkpoint harms neither run nor records."""

import re
import subprocess
from pathlib import Path

import pytest

from mfwrap.records.run_record import TRAINER_STATE
from support.crash.command_line import Crashes
from support.crash.contents import contents, differences
from support.crash.fork_server import ForkServer, Task

_OWN_MOUNTS = ("unshare", "--map-root-user", "--mount")
"""Command that lets a process mount file systems, also without the rights of root."""

_PAGE = 4096
"""Size in bytes of the blocks of a tmpfs."""

_FAILED = re.compile(
    r"mfwrap: the run failed: OSError: \[Errno \d+\] "
    r"(No space left on device|torch\.save failed .* the disk has [\d,]+ free bytes): "
    r"'run/_checkpoint-4\.partial/checkpoint-4/[\w.]+'"
)


@pytest.fixture
def server():
    """Yield a server whose runs may mount file systems."""
    try:
        mounted = subprocess.run(
            [*_OWN_MOUNTS, "mount", "-t", "tmpfs", "tmpfs", "/mnt"],
            capture_output=True,
            check=False,
        )
    except FileNotFoundError:
        pytest.skip("needs unshare")
    if mounted.returncode != 0:
        pytest.skip(f"may not mount a file system: {mounted.stderr.decode()}")
    with ForkServer(_OWN_MOUNTS) as started:
        yield started


@pytest.mark.slow
def test_full_disk(server, tmp_path):
    """The run names a file, its last checkpoint is intact, and it resumes as if never stopped."""
    runs = Crashes(server, tmp_path)
    expected = runs.expected
    alone = tmp_path / "alone" / "run"
    checkpoint = _num_pages(alone / "checkpoint-4")
    # Only a run that has finished has its log beside its checkpoints.
    records = sum(_num_pages(file) for file in alone.glob("*.*") if file.name != TRAINER_STATE)
    for part in (0.1, 0.4, 0.7, 0.95):
        folder = runs.new("full")
        (folder / "run").mkdir()
        size = _PAGE * (records + checkpoint + int(part * checkpoint))
        _call(server, folder, "mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", "run")

        assert runs.run(folder) == 1
        assert _FAILED.match(runs.output(folder).splitlines()[-1]), runs.output(folder)
        assert runs.run(folder, ("verify", "run")) == 0, runs.output(folder)
        assert "checkpoint-2" in runs.output(folder)

        _call(server, folder, "mount", "-o", "remount,size=64m", "run")
        assert runs.run(folder, (*runs.command, "--resume")) == 0, runs.output(folder)
        _call(server, folder, "cp", "-r", "run", "copied")
        assert differences(expected, contents(folder / "copied")) == []
        _call(server, folder, "umount", "run")


def _num_pages(path: Path) -> int:
    files = [file for file in [path, *path.rglob("*")] if file.is_file()]
    return sum(-(-file.stat().st_size // _PAGE) for file in files)


def _call(server: ForkServer, folder: Path, *command: str) -> None:
    """Call a command where the mounts of the server are visible."""
    task = Task(program="subprocess:check_call", arguments=(command,), folder=str(folder))
    (ended,) = server.run(task)
    assert ended.status == 0, (folder / "output_0.txt").read_text(encoding="utf-8")
