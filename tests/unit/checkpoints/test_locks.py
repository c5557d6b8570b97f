"""One program at a time owns a folder, and the folder of a program that has died is free."""

import contextlib
import errno
import fcntl
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mfwrap.checkpoints import locks
from mfwrap.checkpoints.locks import lock_of, owning
from support.programs import Program
from support.ranks.locks import try_together

OWNER = """
import os, sys
from pathlib import Path
from mfwrap.checkpoints.locks import owning
with owning(Path(sys.argv[1])):
    if sys.argv[2:] == ["fork"] and os.fork() == 0:
        sys.stdin.read()
        os._exit(0)
    print("owned", flush=True)
    sys.stdin.read()
"""

REFUSED = """
import sys
from pathlib import Path
from mfwrap.checkpoints.locks import owning
try:
    owning(Path(sys.argv[1])).__enter__()
except BlockingIOError as error:
    print(error)
"""


@pytest.fixture
def lock(tmp_path):
    """Return the lock file of a folder."""
    return lock_of(tmp_path / "run")


@pytest.fixture
def other_program(lock):
    """Start programs that own the lock until their standard input is closed."""
    with contextlib.ExitStack() as stack:

        def start(*words):
            program = stack.enter_context(Program(OWNER, lock, *words))
            assert program.stdout.readline() == "owned\n"
            return program

        yield start


def refusal(lock, **keywords):
    """Return the error of another attempt to own a lock."""
    with pytest.raises(BlockingIOError) as caught, owning(lock, **keywords):
        pass
    return str(caught.value)


def foreign(lock, *, seconds_old=0.0):
    """Write the lock of a program on another machine."""
    facts = {"process": 7, "host": "node-3", "machine": "another", "since": "2026-01-01T00:00:00"}
    lock.write_text(json.dumps(facts))
    written = time.time() - seconds_old
    os.utime(lock, (written, written))


def test_another_program_is_refused(lock, other_program):
    """The sentence names the folder, the process and the host; the folder is free at its end."""
    owner = other_program()

    said = refusal(lock)

    who = f"process {owner.pid} on {os.uname().nodename}"
    assert said.startswith(f"{lock.parent / 'run'} is in use: {who} has been writing it since 20")
    assert said.endswith("; wait for its end, or choose another folder")
    owner.end()
    with owning(lock):
        assert lock.exists()
    assert not list(lock.parent.iterdir())


@pytest.mark.parametrize("words", [(), ("fork",)])
def test_a_killed_program_owns_nothing(lock, other_program, words):
    """The folder of a killed program is free at once, also while its data workers still live."""
    owner = other_program(*words)
    owner.kill()
    assert lock.exists()

    with owning(lock) as is_new:
        assert is_new

    assert not list(lock.parent.iterdir())


def test_a_dead_lock_is_removed(lock, other_program):
    """A reader deletes the lock of a killed program, and no other file."""
    owner = other_program()
    locks.remove_dead_lock(lock)
    assert lock.exists()
    owner.kill()
    locks.remove_dead_lock(lock)
    assert not lock.exists()

    lock.write_text("mine")
    locks.remove_dead_lock(lock)
    assert lock.read_text() == "mine"


def test_a_program_may_enter_again(lock):
    """The lock belongs to the process, until the outermost block ends."""
    with owning(lock) as outer:
        with owning(lock.parent / "." / lock.name) as inner:
            assert (outer, inner) == (True, False)
        assert lock.exists()

    assert not lock.exists()


def test_a_folder_that_was_made_for_the_lock(tmp_path):
    """It is deleted with the lock, if nothing else is in it."""
    for name, written in (("a", False), ("b", True)):
        with owning(tmp_path / name / "run" / "_mfwrap.lock"):
            if written:
                (tmp_path / name / "notes.txt").write_text("mine")

    assert sorted(path.name for path in tmp_path.rglob("*")) == ["b", "notes.txt"]


def test_an_error_within_the_block(lock):
    """The lock is given back after an error, too."""
    with pytest.raises(KeyError), owning(lock):
        raise KeyError

    assert not lock.exists()


def test_another_machine(lock):
    """A machine that has renewed its lock within three minutes counts as alive."""
    foreign(lock, seconds_old=60)
    said = refusal(lock)
    assert "process 7 on node-3 has been writing it since 2026-01-01T00:00:00" in said
    assert said.endswith("; if that host has died, start again in 2 minutes")

    foreign(lock, seconds_old=200)
    with owning(lock) as is_new:
        assert is_new


@pytest.mark.parametrize("lives", [False, True])
def test_waiting_for_another_machine(lock, monkeypatch, lives):
    """Whoever waits takes the lock of a machine that has died, and none that is renewed."""
    foreign(lock, seconds_old=60)
    monkeypatch.setattr(time, "sleep", lambda _: foreign(lock, seconds_old=0 if lives else 200))

    if lives:
        assert "node-3" in refusal(lock, waits=True)
    else:
        with owning(lock, waits=True) as is_new:
            assert is_new


def test_nobody_waits_for_a_program_that_lives(lock, other_program, monkeypatch):
    """The kernel says that another program on this machine lives."""
    other_program()
    monkeypatch.delattr(time, "sleep")

    assert "in use" in refusal(lock, waits=True)


def test_a_lock_is_renewed(lock, monkeypatch):
    """The owner sets the time of the lock file anew, again and again."""
    renewed = []

    class Beats:
        """An event that is awaited twice without being set."""

        def wait(self, seconds):
            renewed.append(seconds)
            return len(renewed) > 2

    foreign(lock, seconds_old=200)
    locks._beat(lock, Beats())

    assert renewed == [30.0] * 3
    assert "node-3" in refusal(lock)


def refuse(*_, **__):
    """Stand for a call that a file system does not support."""
    raise OSError(errno.EOPNOTSUPP, "Operation not supported")


def seen_at_link(lock, monkeypatch):
    """Own a lock; return the files in its folder when the lock file gets its name."""
    seen = []
    link = os.link

    def look(*paths, **keywords):
        seen.extend(path.name for path in lock.parent.iterdir())
        link(*paths, **keywords)

    monkeypatch.setattr(os, "link", look)
    with owning(lock):
        assert [path.name for path in lock.parent.iterdir()] == [lock.name]
        assert json.loads(lock.read_text())["process"] == os.getpid()
        with lock.open() as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert not list(lock.parent.iterdir())
    return seen


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="needs nameless files of Linux")
def test_a_program_that_is_killed_while_it_creates_a_lock(lock, monkeypatch):
    """There is nothing in the folder before the whole lock file."""
    assert seen_at_link(lock, monkeypatch) == []


def test_a_file_system_without_nameless_files(lock, monkeypatch):
    """The lock file is written beside the lock first."""
    in_folder = os.open

    def refuse_nameless(path, flags, *rest, **keywords):
        nameless = getattr(os, "O_TMPFILE", 0)
        if nameless and flags & nameless == nameless:
            refuse()
        return in_folder(path, flags, *rest, **keywords)

    monkeypatch.setattr(os, "open", refuse_nameless)
    (beside,) = seen_at_link(lock, monkeypatch)
    assert beside.startswith(f"{lock.name}.")
    assert beside.endswith(".partial")


def test_a_file_system_without_links(lock, monkeypatch):
    """The lock works there, too."""
    monkeypatch.setattr(os, "link", refuse)
    with owning(lock), Program(REFUSED, lock) as other:
        said = other.end()

    assert f"process {os.getpid()} on" in said
    assert not list(lock.parent.iterdir())


def test_a_file_system_without_locks(lock, monkeypatch):
    """Without the kernel's lock, only the age of the file says who lives."""
    monkeypatch.setattr(locks, "_FLOCK", refuse)
    with owning(lock):
        written = lock.read_text()

    lock.write_text(written)
    assert "start again in 3 minutes" in refusal(lock)
    os.utime(lock, (0, 0))
    with owning(lock) as is_new:
        assert is_new


@pytest.mark.skipif(not Path("/proc/self/ns/pid").is_symlink(), reason="needs /proc of Linux")
@pytest.mark.parametrize("namespace", ["own", "another"])
def test_a_killed_program_without_locks(lock, monkeypatch, namespace):
    """Its folder is free if this machine has no such process, in the same PID namespace."""
    monkeypatch.setattr(locks, "_FLOCK", refuse)
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    with owning(lock):
        facts = json.loads(lock.read_text())
    facts["process"] = ended.pid
    if namespace == "another":
        facts["pid_namespace"] = namespace
    lock.write_text(json.dumps(facts))

    if namespace == "another":
        assert "start again in 3 minutes" in refusal(lock)
    else:
        with owning(lock) as is_new:
            assert is_new


@pytest.mark.parametrize("lives", [False, True])
def test_the_lock_of_another_user(lock, other_program, monkeypatch, lives):
    """In a folder of a group, a user may delete the lock file of another one, but not write it."""
    owner = other_program()
    if not lives:
        owner.kill()
    in_folder = os.open

    def refuse_to_write(path, flags, *rest, **keywords):
        if str(path) == str(lock) and flags & os.O_RDWR:
            raise PermissionError(errno.EACCES, "Permission denied")
        return in_folder(path, flags, *rest, **keywords)

    monkeypatch.setattr(os, "open", refuse_to_write)
    if lives:
        assert f"is in use: process {owner.pid} on" in refusal(lock)
    else:
        with owning(lock) as is_new:
            assert is_new


@pytest.mark.parametrize("content", ["mine", "[]", '{"a": 1}'])
def test_a_file_of_somebody_else(lock, content):
    """A file under the name of the lock stays, however old it is."""
    lock.write_text(content)
    os.utime(lock, (0, 0))

    with pytest.raises(FileExistsError, match=r"_run\.lock is in the way"), owning(lock):
        pass

    assert lock.read_text() == content


@pytest.mark.parametrize("kind", ["link", "folder"])
def test_a_link_or_a_folder_of_somebody_else(lock, kind):
    """It stays, and nothing is written through a link."""
    if kind == "link":
        lock.symlink_to(lock.parent / "elsewhere")
    else:
        lock.mkdir()

    with pytest.raises(FileExistsError, match=r"_run\.lock is in the way"), owning(lock):
        pass

    assert list(lock.parent.iterdir()) == [lock]


def test_all_ranks_learn_of_a_refusal(two_ranks, lock):
    """Rank 0 owns the lock for all ranks; if it is refused, all of them raise its error."""
    assert two_ranks.run(try_together, str(lock)) == ["owned", "owned"]
    with owning(lock):
        first, second = two_ranks.run(try_together, str(lock))
    assert first == second
    assert first.startswith(f"BlockingIOError: {lock.parent / 'run'} is in use: process ")
