"""List the file operations of a run, and make one of them kill the run or fail.

strace numbers a thread's calls of a system call from 1. A run on one rank is deterministic, so this
number names the same operation in each repetition of a run. With several ranks the main thread also
writes to sockets, in another order each time, so strace is told to count the calls on one path
only. So it is if a second thread writes checkpoints: strace counts the calls of each thread.
"""

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from mfwrap.checkpoints.whole import OWN_PARTIAL

__all__ = [
    "FAILURES",
    "MISSING_STRACE",
    "Operation",
    "inject_nth",
    "inject_on_path",
    "kill_points",
    "kinds_of_kill_points",
    "operations",
    "trace_arguments",
    "unsynced_at_commits",
    "written_in_place",
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
_WRITING = ("ftruncate", "openat", "pwrite64", "truncate", "write", "writev")
_FLAGS = re.compile(r"O_[A-Z|_]+")
_LINE = re.compile(r"(?P<thread>\d+) +(?P<call>\w+)\((?P<rest>.*)")
_UNFINISHED = " <unfinished ...>"
_RESUMED = re.compile(r"(?P<thread>\d+) +<\.\.\. \w+ resumed>(?P<rest>.*)")
_DESCRIPTOR = re.compile(r"\d+<([^>]+)>")
_IN_FOLDER = re.compile(r'(?:AT_FDCWD|\d+)<([^>]+)>, "([^"]+)"')
_NAME = re.compile(r'"([^"]+)"')
_DIGITS = re.compile(r"\d+")
_REMOVED = re.compile(r"(?<=/removed/).*")
_NAMELESS = re.compile(r"#\d+(?: \(deleted\))?")
"""What a file that was opened without a name is called."""

_TEMPORARY = re.compile(r"\.tmp\w{6}$")
"""Name that safetensors draws at random for the file that it writes."""

_OWN_PARTIAL = re.compile(rf"{OWN_PARTIAL}$")


class Operation(NamedTuple):
    """A system call of a run that changes or syncs a file of its folder."""

    call: str
    number: int
    """Number of the call among the run's calls of the same system call, from 1."""

    paths: tuple[str, ...]
    """Files and folders, relative to the current folder of the run."""

    succeeds: bool
    number_on_path: int = 1
    """Number of the call among the calls of the same system call that name `watched`, from 1."""

    flags: str = ""
    """Flags of a call that opens a file, such as ``O_WRONLY|O_CREAT``."""

    is_hit: bool = True
    """Whether strace hits this call: it counts the calls of each thread, and no other thread has
    reached `number_on_path` before, for example by opening the file to read it."""

    @property
    def watched(self) -> str:
        """Path by which strace recognizes the call: its first one whose name is not random.

        It is the folder for a call that names a file by its folder's descriptor.
        """
        return next((each for each in _watching(self.call, self.paths) if not _is_random(each)), "")

    @property
    def kind(self) -> tuple[str, ...]:
        """What the operation does, without the numbers in names and the names of removed files."""
        return self.call, *(_REMOVED.sub("", _DIGITS.sub("", each)) for each in self.paths)

    @property
    def changes_files(self) -> bool:
        """Whether a kill after the operation leaves other files than a kill before it."""
        if self.call == "openat":
            return self.succeeds and not {"O_CREAT", "O_TRUNC"}.isdisjoint(self.flags.split("|"))
        return self.succeeds and self.call not in _UNCHANGING

    def __str__(self) -> str:
        return f"{self.call} {self.number}: {' -> '.join(self.paths)}"

    def identity(self) -> tuple[str, int, tuple[str, ...]]:
        """Return what is the same in each repetition, also if the operation fails."""
        return self.call, self.number, self.paths

    def identity_on_path(self) -> tuple[str, int, tuple[str, ...]]:
        """Return the `identity` if only the calls that name `watched` are counted."""
        return self.call, self.number_on_path, self.paths

    def names(self) -> list[str]:
        """Return names, one of which an error about the operation must contain.

        For a temporary file they are the name of the final file, or of the folder if the temporary
        name is random.
        """
        paths = [Path(each) for each in self.paths]
        return [
            path.parent.name
            if path.name == ".tmp"
            else path.name.removesuffix(".partial").removesuffix(".random")
            for path in paths
        ]


def unsynced_at_commits(found: Iterable[Operation]) -> list[str]:
    """Return a line for each file or name that an operation relies on before it is synced.

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
    """Return the unsynced files and names that must be on disk before `path` is renamed."""
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


def written_in_place(found: Iterable[Operation]) -> list[str]:
    """Return the operations that write to a file under its final name, where readers may see it.

    Records are allowed to grow, but not to be emptied.
    """
    return [
        str(each)
        for each in found
        if each.succeeds
        and each.call in _WRITING
        and _is_final(path := Path(each.paths[0]))
        and ("O_TRUNC" in each.flags or path.suffix != ".jsonl")
    ]


def kill_points(found: Iterable[Operation]) -> Iterator[Operation]:
    """Yield the operations before which the files differ from those before the last point."""
    has_changed = True
    for operation in found:
        if has_changed:
            yield operation
        has_changed = operation.changes_files


def kinds_of_kill_points(found: Iterable[Operation]) -> list[Operation]:
    """Return an operation after each kind of change to the files.

    The last change of each kind counts, because a checkpoint may exist by then. Operations that
    strace cannot count on their path are passed over: those on files with a random name, those that
    another thread hides, and creating folders, which is a race between ranks.
    """
    points: dict[tuple[str, ...], Operation] = {}
    kinds: list[tuple[str, ...]] = []  # of the changes since the last point
    for operation in found:
        is_known = operation.watched and operation.is_hit and operation.call != "mkdir"
        if operation.succeeds and is_known:
            points |= dict.fromkeys(kinds, operation)
            kinds = []
        if operation.changes_files:
            kinds.append(operation.kind)
    return list(dict.fromkeys(points.values()))


def trace_arguments(folder: Path) -> tuple[str, ...]:
    """Return the arguments of strace that write the calls of `FAILURES` to ``trace.txt``.

    Args:
        folder: Current folder of the process.
    """
    calls = ",".join(FAILURES)
    return ("-f", "-y", "-s", "0", "-o", str(folder / "trace.txt"), f"--trace={calls}")


def inject_nth(operation: Operation, effect: str, folder: Path) -> tuple[str, ...]:
    """Return the arguments of strace that crash a process at an operation.

    Args:
        operation: Operation of a run on one rank.
        effect: ``signal=...`` or ``error=...``. Both take effect before the operation is done.
        folder: Current folder of the process.
    """
    injection = f"--inject={operation.call}:{effect}:when={operation.number}"
    return (*trace_arguments(folder), injection)


def inject_on_path(operation: Operation, effect: str, folder: Path) -> tuple[str, ...]:
    """Return the arguments of strace that crash a process at an operation on several ranks.

    Only the calls that name the operation's `watched` path are counted and traced.

    Args:
        operation: Operation with a `watched` path.
        effect: ``signal=...`` or ``error=...``. Both take effect before the operation is done.
        folder: Current folder of the process.
    """
    paths = (operation.watched, folder / operation.watched)
    injection = f"--inject={operation.call}:{effect}:when={operation.number_on_path}"
    return (*trace_arguments(folder), *(f"--trace-path={each}" for each in paths), injection)


def operations(trace: Path, folder: Path, *, by_threads: bool = False) -> list[Operation]:
    """Read the operations on a folder, and on everything in it, from a trace.

    Args:
        trace: File that strace wrote.
        folder: Folder inside the current folder of the traced process.
        by_threads: Whether other threads than the main one write. Then only the numbers on a path
            are the same in each repetition.
    """
    lines = _whole_lines(trace)
    found: list[Operation] = []
    counts: Counter[tuple[str, ...]] = Counter()
    first: dict[tuple[str, str, int], str] = {}
    calls = [match for line in lines if (match := _LINE.match(line))]  # not "+++ exited with 0 +++"
    for match in calls:
        call, rest = match["call"], match["rest"]
        is_main = match["thread"] == calls[0]["thread"]
        paths = _paths(call, rest, folder)
        thread = "" if is_main else match["thread"]
        if is_main or by_threads:
            counts.update(
                [
                    (thread, call),
                    *((thread, call, each) for each in _watching(call, paths)),
                ]
            )
        for each in _watching(call, paths):
            first.setdefault((call, each, counts[thread, call, each]), thread)
        flags = _FLAGS.search(rest)[0] if call == "openat" else ""
        if not paths or (call == "openat" and not _is_opened_to_write(flags)):
            continue
        assert is_main or by_threads, (
            f"{match[0]}: only operations of the main thread can be repeated"
        )
        count = counts[thread, call]
        operation = Operation(call, count, paths, " = -1 " not in rest, flags=flags)
        number = counts[thread, call, operation.watched]
        is_hit = first.get((call, operation.watched, number), thread) == thread
        found.append(operation._replace(number_on_path=number, is_hit=is_hit))
    return found


def _whole_lines(trace: Path) -> list[str]:
    """Return the lines of a trace, with calls that another thread interrupted as one line."""
    lines: list[str] = []
    unfinished: dict[str, int] = {}  # place of the begin of each thread's call in `lines`
    for line in trace.read_text(encoding="utf-8", errors="replace").splitlines():
        if match := _RESUMED.match(line):
            lines[unfinished.pop(match["thread"])] += match["rest"]
            continue
        if line.endswith(_UNFINISHED):
            unfinished[line.split()[0]] = len(lines)
        lines.append(line.removesuffix(_UNFINISHED))
    return lines


def _is_opened_to_write(flags: str) -> bool:
    # A file of O_TMPFILE has no name.
    return any(each in flags for each in ("O_WRONLY", "O_RDWR")) and "O_TMPFILE" not in flags


def _watching(call: str, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return the paths by which strace recognizes a call: of a renaming, the source."""
    if call == "unlinkat":
        return tuple(str(Path(each).parent) for each in paths)
    return paths[:1] if call == "rename" else tuple(dict.fromkeys(paths))


def _is_random(path: str | Path) -> bool:
    return Path(path).name == ".tmp" or Path(path).name.endswith(".random.partial")


def _is_final(path: Path) -> bool:
    # Nobody reads a lock as a file of the run, and the list of its files only grows.
    return not path.name.startswith("_mfwrap_files") and not any(
        part.endswith((".lock", ".partial", ".tmp")) for part in path.parts
    )


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
    named = [Path(path) for path in found if not _NAMELESS.fullmatch(Path(path).name)]
    inside = [path for path in named if path.is_relative_to(folder)]
    return tuple(_without_random_part(os.path.relpath(each, folder.parent)) for each in inside)


def _without_random_part(path: str) -> str:
    return _OWN_PARTIAL.sub(".random.partial", _TEMPORARY.sub(".tmp", path))
