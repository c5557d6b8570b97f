"""Let one program at a time write a folder.

The owner of a folder holds a lock file. Two things say whether it lives:

- The kernel's lock on the file (``flock``), which ends with the process. On one machine this is
  exact: the folder of a killed program is free at once. On a file system without such locks, the
  folder is free if the machine has no process with the owner's id.
- The age of the file, which its owner renews every 30 seconds. Some network file systems keep the
  kernel's lock on each machine to itself, and a machine that has died gives no answer. So the lock
  of another machine is free after three minutes without a renewal.

The lock file gets its name by a link, which fails if the name is taken, and is deleted by its owner
while it holds the kernel's lock.
`filelock` would do, but whether it closes the file in forked data workers, which outlive a killed
trainer for some seconds, and whether it notices a file that was deleted, depends on its version.
"""

import contextlib
import datetime as dt
import errno
import glob
import json
import os
import platform
import secrets
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from mfwrap.checkpoints.write_errors import naming_written_file
from mfwrap.collectives import gather_objects, raising_together, this_rank

try:
    import fcntl
except ImportError:  # Windows
    _FLOCK = None
else:
    _FLOCK = fcntl.flock

PARTIAL = ".partial"
"""Suffix of files and folders that are still being written, replaced or deleted."""

RUN_LOCK = "_mfwrap.lock"
"""Name of the lock file of a run folder."""

_NOT_WRITABLE = {errno.EACCES, errno.EEXIST, errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS}
_SECONDS_OF_BEAT = 30.0
_SECONDS_TO_LIVE = 180.0
_SECONDS_BETWEEN_LOOKS = 5.0


class _Held(NamedTuple):
    """A lock of this process."""

    descriptor: int
    ended: threading.Event
    depths: list[None]
    """An entry for each enclosing block that owns the folder."""


class _Owner(NamedTuple):
    """Owner of a lock that lives, as far as can be seen."""

    said: str
    renewed_at: float
    seconds_left: float | None
    """Time until the lock is free unless it is renewed; ``None`` if the kernel says it is held."""


_TOKEN = secrets.token_hex(8)

_held: dict[Path, _Held] = {}


def lock_of(folder: Path) -> Path:
    """Return the lock file of a folder that is written as a whole, beside it."""
    return folder.with_name(f"_{folder.name}.lock")


def process_token() -> str:
    """Return what is the same within this process, and different in all others."""
    return f"{_TOKEN}-{os.getpid()}"


def owner_token(lock: Path) -> str | None:
    """Return the `process_token` of the owner of a lock; ``None`` if it is free or unreadable."""
    try:
        return str(json.loads(lock.read_text(encoding="utf-8"))["token"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def remove_dead_lock(lock: Path) -> None:
    """Delete the lock file that a killed program has left, if it can be told that it was killed."""
    with contextlib.suppress(OSError):
        _living_owner(lock)


@contextlib.contextmanager
def owning(lock: Path, *, waits: bool = False) -> Iterator[bool]:
    """Own a lock within the block. A process that owns it already may enter again.

    Args:
        lock: Lock file. Its folder is created, and deleted at the end if it is still empty.
        waits: Whether to wait up to three minutes if another machine owns the lock, until it is
            known whether that machine lives.

    Yields:
        Whether this is the outermost block.

    Raises:
        BlockingIOError: If another program owns the lock.
        FileExistsError: If the lock file is a file of somebody else.
        OSError: If the lock file cannot be written.
    """
    created = [each for each in (lock.parent, *lock.parent.parents) if not each.exists()]
    key = lock.parent.resolve() / lock.name
    is_new = key not in _held
    if is_new:
        with naming_folder(lock.parent):
            lock.parent.mkdir(parents=True, exist_ok=True)
            _held[key] = _acquire(lock, waits=waits)
        # A process that was killed in `_create_beside` has left its file.
        for left in lock.parent.glob(f"{glob.escape(lock.name)}.*{PARTIAL}"):
            with contextlib.suppress(OSError):
                _living_owner(left)
    _held[key].depths.append(None)
    try:
        yield is_new
    finally:
        # A forked child has forgotten the locks of its parent.
        held = _held.get(key)
        if held is not None:
            held.depths.pop()
            if not held.depths:
                del _held[key]
                _release(lock, held)
                with contextlib.suppress(OSError):  # not empty, as usual
                    for folder in created:
                        folder.rmdir()


@contextlib.contextmanager
def owning_together(lock: Path, *, waits: bool = False) -> Iterator[bool]:
    """Own a lock within the block; rank 0 does it for all ranks. Call it on all ranks.

    Args:
        lock: Lock file, on a disk of rank 0.
        waits: As in `owning`.

    Yields:
        Whether this is the outermost block.

    Raises:
        BlockingIOError: On all ranks, if another program owns the lock.
        OSError: On all ranks, if rank 0 cannot write the lock file.
    """
    with contextlib.ExitStack() as stack:
        is_new = False
        with raising_together():
            if this_rank() == 0:
                is_new = stack.enter_context(owning(lock, waits=waits))
        yield gather_objects(is_new)[0]


@contextlib.contextmanager
def owning_if_free(folder: Path) -> Iterator[bool]:
    """Own a folder, and the run folder that it is in, if nobody else does.

    Yields:
        Whether this process owns both.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(owning(folder.parent / RUN_LOCK))
            stack.enter_context(owning(lock_of(folder)))
        except BlockingIOError:
            yield False
        else:
            yield True


@contextlib.contextmanager
def naming_folder(folder: Path) -> Iterator[None]:
    """Within the block, name the folder in the error if it cannot be created or written."""
    try:
        yield
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        msg = f"cannot write to the folder {folder}: {error.strerror}; choose a writable folder"
        raise OSError(error.errno, msg) from error


def _acquire(lock: Path, *, waits: bool) -> _Held:
    first: _Owner | None = None
    while True:
        if not os.path.lexists(lock):
            with contextlib.suppress(FileExistsError):
                return _create(lock)
        owner = _living_owner(lock)
        if owner is None:
            continue
        has_renewed = first is not None and owner.renewed_at != first.renewed_at
        if not waits or owner.seconds_left is None or has_renewed:
            raise BlockingIOError(owner.said)
        first = owner
        time.sleep(min(_SECONDS_BETWEEN_LOOKS, owner.seconds_left))


def _create(lock: Path) -> _Held:
    """Create a lock file that holds the kernel's lock and says whose it is from its first moment.

    Raises:
        FileExistsError: If there is a lock file.
        OSError: If the file cannot be written.
    """
    descriptor = _create_nameless(lock)
    if descriptor is None:
        descriptor = _create_beside(lock)
    held = _Held(descriptor, threading.Event(), [])
    threading.Thread(target=_beat, args=(lock, held.ended), daemon=True).start()
    return held


def _create_nameless(lock: Path) -> int | None:
    """Create a lock file from a file without a name, of which a killed process leaves nothing.

    Returns:
        The descriptor; ``None`` where the system or the file system has no such files.
    """
    try:
        descriptor = os.open(lock.parent, os.O_RDWR | os.O_TMPFILE, 0o666)
    except (AttributeError, OSError):
        return None
    try:
        _fill(lock, descriptor)
        # Only with `src_dir_fd`, which counts for nothing here, is the link in /proc followed.
        file = f"/proc/self/fd/{descriptor}"
        os.link(file, lock, src_dir_fd=descriptor, follow_symlinks=True)
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, FileExistsError) or not isinstance(error, OSError):
            raise
        return None
    return descriptor


def _create_beside(lock: Path) -> int:
    """Create a lock file from a file beside it, and return its descriptor."""
    own = lock.with_name(f"{lock.name}.{secrets.token_hex(8)}{PARTIAL}")
    descriptor = _write(own)
    try:
        is_linked = _link(own, lock)
        with contextlib.suppress(OSError):
            own.unlink()
    except BaseException:
        # While it is open, this process holds the kernel's lock.
        os.close(descriptor)
        own.unlink(missing_ok=True)
        raise
    if not is_linked:
        os.close(descriptor)
        descriptor = _write(lock)
    return descriptor


def _link(own: Path, lock: Path) -> bool:
    """Link a file to its final name; return False on a file system without links."""
    try:
        os.link(own, lock)
    except FileExistsError:
        raise
    except OSError:
        return False
    return True


def _write(path: Path) -> int:
    """Write a new lock file, and return its descriptor."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        _fill(path, descriptor)
    except BaseException:
        os.close(descriptor)
        path.unlink(missing_ok=True)
        raise
    return descriptor


def _fill(path: Path, descriptor: int) -> None:
    """Take the kernel's lock on a new file, and write into it whose it is."""
    now = dt.datetime.now(dt.UTC).isoformat(timespec="seconds")
    facts = {
        "process": os.getpid(),
        "host": platform.node(),
        "machine": _machine(),
        "pid_namespace": _pid_namespace(),
        "token": process_token(),
        "since": now,
    }
    with naming_written_file(path):
        if _FLOCK is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                _FLOCK(descriptor, fcntl.LOCK_EX)
        os.write(descriptor, json.dumps(facts).encode())


def _release(lock: Path, held: _Held) -> None:
    held.ended.set()
    try:
        with contextlib.suppress(OSError):
            if _is_at(lock, held.descriptor):
                lock.unlink()
    finally:
        os.close(held.descriptor)


def _beat(lock: Path, ended: threading.Event) -> None:
    while not ended.wait(_SECONDS_OF_BEAT):
        with contextlib.suppress(OSError):
            os.utime(lock)


def _living_owner(lock: Path) -> _Owner | None:
    """Return the owner of a lock file; delete the file and return ``None`` if it has died."""
    try:
        descriptor = _open_existing(lock)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno in {errno.ELOOP, errno.EISDIR}:  # a link or a folder
            raise _in_the_way(lock) from error
        raise
    try:
        is_ours = _try_flock(descriptor)
        facts = _read(lock, descriptor)
        if not _is_at(lock, descriptor):
            return None  # its owner has deleted it meanwhile
        renewed_at = os.fstat(descriptor).st_mtime
        seconds_left: float | None = None
        if is_ours is not False:
            is_of_this_machine = facts.get("machine") == _machine()
            has_died = is_of_this_machine and (is_ours or _has_ended(facts))
            seconds_left = renewed_at + _SECONDS_TO_LIVE - _time_of_disk(lock.parent)
            if has_died or seconds_left <= 0:
                lock.unlink()
                return None
        return _Owner(_refusal(lock, facts, seconds_left), renewed_at, seconds_left)
    finally:
        os.close(descriptor)


def _open_existing(lock: Path) -> int:
    no_link = getattr(os, "O_NOFOLLOW", 0)
    try:
        # A network file system gives the kernel's lock only to those who may write.
        return os.open(lock, os.O_RDWR | no_link)
    except PermissionError:  # a file of another user, in a folder of both
        return os.open(lock, os.O_RDONLY | no_link)


def _refusal(lock: Path, facts: dict[str, Any], seconds_left: float | None) -> str:
    name = lock.name.removeprefix("_").removesuffix(".lock")
    folder = lock.parent if lock.name == RUN_LOCK else lock.with_name(name)
    who = f"process {facts.get('process', '?')} on {facts.get('host', 'an unknown host')}"
    end = "wait for its end, or choose another folder"
    if seconds_left is not None:
        end += f"; if that host has died, start again in {seconds_left / 60:.0f} minutes"
    return f"{folder} is in use: {who} has been writing it since {facts.get('since', '?')}; {end}"


def _try_flock(descriptor: int) -> bool | None:
    """Take the kernel's lock; return False if another process has it, None if there are none."""
    if _FLOCK is None:
        return None
    try:
        _FLOCK(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _is_at(lock: Path, descriptor: int) -> bool:
    """Return whether a path is still the name of an open file."""
    try:
        return os.path.samestat(lock.stat(), os.fstat(descriptor))
    except FileNotFoundError:
        return False


def _read(lock: Path, descriptor: int) -> dict[str, Any]:
    """Return what a lock file says; nothing if its owner has just created it."""
    text = os.pread(descriptor, 4096, 0)
    try:
        facts = json.loads(text) if text else {"machine": None}
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or "machine" not in facts:
        raise _in_the_way(lock)
    return facts


def _in_the_way(lock: Path) -> FileExistsError:
    return FileExistsError(f"{lock} is in the way: it must be a lock file of mfwrap; rename it")


def _time_of_disk(folder: Path) -> float:
    """Return the present time by the clock that gives files their times."""
    with tempfile.TemporaryFile(dir=folder) as file:
        return os.fstat(file.fileno()).st_mtime


def _machine() -> str:
    """Return what is the same for all processes that share a kernel, and only for them."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return platform.node()


def _pid_namespace() -> str | None:
    """Return what is the same for all processes whose ids can be compared; ``None`` if unknown."""
    try:
        return str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        return None


def _has_ended(facts: dict[str, Any]) -> bool:
    """Return whether this machine knows that it has no process with the id of a lock's owner."""
    process, namespace = facts.get("process"), _pid_namespace()
    if namespace is None or facts.get("pid_namespace") != namespace or type(process) is not int:
        return False
    with contextlib.suppress(PermissionError):  # a process of another user
        try:
            os.kill(process, 0)  # sends no signal
        except (ProcessLookupError, OverflowError):
            return True
    return False


def _forget_in_child() -> None:
    """Close the lock files in a forked child: else the child would keep its parent's locks."""
    for held in _held.values():
        os.close(held.descriptor)
    _held.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
