"""List the file operations of a run, and make one of them kill the run or fail.

strace numbers a thread's calls of a system call from 1. A run with one thread is deterministic, so
this number names the same operation in each repetition of a run.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

__all__ = [
    "FAILURES",
    "MISSING_STRACE",
    "Operation",
    "inject",
    "operations",
    "trace_arguments",
    "unsynced_at_commits",
]


def _missing_strace() -> str:
    if shutil.which("strace") is None:
        return "needs strace"
    traced = subprocess.run(
        ["strace", "-o", os.devnull, "true"], capture_output=True, check=False, text=True
    )
    return "" if traced.returncode == 0 else f"strace may not trace: {traced.stderr}"


MISSING_STRACE = _missing_strace()
"""Reason to skip a test that needs strace; empty if strace works."""

FAILURES = {
    "fsync": "EIO",
    "fdatasync": "EIO",
    "ftruncate": "EIO",
    "truncate": "EIO",
    "mkdir": "ENOSPC",
    "openat": "ENOSPC",
    "pwrite64": "ENOSPC",
    "rename": "EACCES",
    "renameat": "EACCES",
    "renameat2": "EACCES",
    "rmdir": "EIO",
    "unlink": "EIO",
    "unlinkat": "EIO",
    "write": "ENOSPC",
    "writev": "ENOSPC",
}
"""System calls that change or sync files, and the error with which each fails."""

_UNCHANGING = ("fsync", "fdatasync")
_LINE = re.compile(r"(?P<thread>\d+) +(?P<call>\w+)\((?P<rest>.*)")
_DESCRIPTOR = re.compile(r"\d+<([^>]+)>")
_IN_FOLDER = re.compile(r'(?:AT_FDCWD|\d+)<([^>]+)>, "([^"]+)"')
_NAME = re.compile(r'"([^"]+)"')
_TEMPORARY = re.compile(r"\.tmp\w{6}$")
"""Name that safetensors draws at random for the file that it writes."""


class Operation(NamedTuple):
    """A system call of a run that changes or syncs a file of its folder."""

    call: str
    number: int
    """Number of the call among the run's calls of the same system call, from 1."""

    paths: tuple[str, ...]
    """Files and folders, relative to the current folder of the run."""

    succeeds: bool

    @property
    def changes_files(self) -> bool:
        """Whether a kill after the operation leaves other files than a kill before it."""
        return self.succeeds and self.call not in _UNCHANGING

    def __str__(self) -> str:
        return f"{self.call} {self.number}: {' -> '.join(self.paths)}"

    def identity(self) -> tuple[str, int, tuple[str, ...]]:
        """Return what is the same in each repetition, also if the operation fails."""
        return self.call, self.number, self.paths

    def names(self) -> list[str]:
        """Return names of which an error about the operation must hold one.

        For a temporary file they are the name of the final file, or of the folder if the temporary
        name is random.
        """
        paths = [Path(each) for each in self.paths]
        return [
            path.parent.name if path.name == ".tmp" else path.name.removesuffix(".partial")
            for path in paths
        ]


def unsynced_at_commits(found: Iterable[Operation]) -> list[str]:
    """Return what would be lost if the power failed just after an operation that relies on it.

    - A file or folder gets its final name before its content is synced.
    - A checkpoint gets its final name before the records are synced.
    - A checkpoint is removed before the name of a newer checkpoint is synced.

    Args:
        found: Operations of a run that starts in an empty folder.
    """
    lines: list[str] = []
    files: set[Path] = set()  # whose content is not synced
    names: set[Path] = set()  # that are not synced in their folder
    known: set[Path] = set()  # that have been created
    for operation in found:
        call, path, *targets = operation.call, *map(Path, operation.paths)
        if not operation.succeeds:
            continue
        if call in _UNCHANGING:
            files.discard(path)
            names -= {each for each in names if each.parent == path}
        elif targets:
            lost = _relied_on(path, targets[0], files, names)
            lines += [f"{operation}: {each} is not synced" for each in sorted(lost)]
            files = {_moved(each, path, targets[0]) for each in files}
            names = {_moved(each, path, targets[0]) for each in names} | {targets[0]}
        elif call in {"rmdir", "unlink", "unlinkat"}:
            files.discard(path)
            names.discard(path)
        elif call in {"mkdir", "openat"}:
            names |= {path} - known
            known.add(path)
        else:
            files.add(path)
    return lines


def _relied_on(path: Path, target: Path, files: set[Path], names: set[Path]) -> set[Path]:
    """Return the unsynced files and names that must not be lost when `path` is renamed."""
    lost: set[Path] = set()
    if _is_final(target):
        lost |= {each for each in files if each.is_relative_to(path)}
        lost |= {each for each in names if path in each.parents}
    if _is_checkpoint(target):
        lost |= {each for each in files | names if each.suffix == ".jsonl"}
    if _is_checkpoint(path):
        lost |= {each for each in names if _is_checkpoint(each)}
    return lost


def _moved(path: Path, source: Path, target: Path) -> Path:
    return target / path.relative_to(source) if path.is_relative_to(source) else path


def trace_arguments(trace: Path, injection: str) -> tuple[str, ...]:
    """Return the arguments of strace that write the calls of `FAILURES` to a file.

    Args:
        trace: File for the trace.
        injection: What strace does to the calls; ``""`` for nothing.
    """
    calls = ",".join(FAILURES)
    injected = [f"--inject={injection}"] if injection else []
    return ("-f", "-y", "-s", "0", "-o", str(trace), f"--trace={calls}", *injected)


def inject(operation: Operation, effect: str) -> str:
    """Return strace's injection of an effect into an operation.

    Args:
        operation: Operation of the run that will be traced.
        effect: ``signal=...`` or ``error=...``. Both take effect before the operation is done.
    """
    return f"{operation.call}:{effect}:when={operation.number}"


def operations(trace: Path, folder: Path) -> list[Operation]:
    """Read the operations on a folder, and on everything in it, from a trace.

    Args:
        trace: File that strace wrote.
        folder: Folder inside the current folder of the traced process.
    """
    lines = trace.read_text(encoding="utf-8", errors="replace").splitlines()
    found, counts, main = [], dict.fromkeys(FAILURES, 0), lines[0].split()[0]
    for line in lines:
        match = _LINE.match(line)
        if match is None:  # "+++ exited with 0 +++", or the rest of an unfinished call
            continue
        call, rest = match["call"], match["rest"]
        is_main = match["thread"] == main
        counts[call] += is_main
        paths = _paths(call, rest, folder)
        if not paths or (call == "openat" and "O_CREAT" not in rest):
            continue
        assert is_main, f"{line}: only operations of the main thread can be repeated"
        found.append(Operation(call, counts[call], paths, succeeds=" = -1 " not in rest))
    return found


def _is_final(path: Path) -> bool:
    return not any(part.endswith((".partial", ".tmp")) for part in path.parts)


def _is_checkpoint(path: Path) -> bool:
    return _is_final(path) and path.name.startswith("checkpoint-")


def _paths(call: str, arguments: str, folder: Path) -> tuple[str, ...]:
    """Return the paths in the arguments of a call, if they are in a folder."""
    if call.startswith(("openat", "unlinkat", "renameat")):
        found = [str(Path(*each)) for each in _IN_FOLDER.findall(arguments)]
    elif call.startswith(("mkdir", "rename", "rmdir", "truncate", "unlink")):
        found = [str(folder.parent / each) for each in _NAME.findall(arguments)]
    else:
        found = _DESCRIPTOR.findall(arguments)[:1]
    inside = [path for path in found if Path(path).is_relative_to(folder)]
    return tuple(_TEMPORARY.sub(".tmp", os.path.relpath(each, folder.parent)) for each in inside)
