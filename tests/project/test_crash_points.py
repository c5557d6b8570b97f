"""`mfwrap train` loses nothing if it is killed at a file operation, or if the operation fails.

A run of the command line with all monitors is traced once. Then it is repeated for each operation
on a file of its run folder: the process is killed at the operation, or the operation fails. The
crashed run is resumed, and all files are compared with those of a run that was not crashed.
"""

import shutil
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from support.crash.command_line import Crashes
from support.crash.contents import differences
from support.crash.operations import (
    MISSING_STRACE,
    Operation,
    kill_points,
    kinds_of_kill_points,
    trace_arguments,
    unsynced_at_commits,
    written_in_place,
)

pytestmark = pytest.mark.skipif(bool(MISSING_STRACE), reason=MISSING_STRACE)

PARTS = 6
"""Number of tests that the points of a command are divided into, so that they run in parallel."""


@pytest.fixture(scope="module")
def first_run(fork_server, tmp_path_factory):
    """Return crashes of a run that starts in an empty folder."""
    return Crashes(fork_server, tmp_path_factory.mktemp("first"))


def faults(crashes: Crashes, kind: str, points: Iterable[Operation]) -> list[str]:
    """Crash a run at each point and resume it; return what differs from a run without a crash.

    Args:
        crashes: Runs to crash.
        kind: ``"killed"`` or ``"failed"``: what the operations do to a run.
        points: Operations.
    """
    faults_of = crashes.faults_of_kill if kind == "killed" else crashes.faults_of_failure
    return [f"{point}: {fault}" for point in points for fault in faults_of(point)[:5]]


def before(crashes: Crashes, name: str) -> list[Operation]:
    """Return the operations before the first one on a file or folder of a name."""
    found = crashes.operations
    return found[: next(i for i, each in enumerate(found) if name in str(each))]


@pytest.mark.slow
def test_synced_before_it_counts(first_run):
    """Files are synced before they get their final names and before a checkpoint is removed."""
    assert unsynced_at_commits(first_run.operations) == []


def test_no_file_is_written_under_its_final_name(first_run):
    """Only records are written where readers see them, and they only grow."""
    assert written_in_place(first_run.operations) == []


def test_a_file_that_is_written_in_place_is_found():
    """The check of `test_no_file_is_written_under_its_final_name` finds a file and a record."""
    appended, emptied = "O_WRONLY|O_CREAT|O_APPEND", "O_WRONLY|O_CREAT|O_TRUNC"
    found = [
        Operation("openat", 1, ("run/a.jsonl",), succeeds=True, flags=appended),
        Operation("openat", 2, ("run/b.jsonl",), succeeds=True, flags=emptied),
        Operation("openat", 3, ("run/c.json.partial",), succeeds=True, flags=emptied),
        Operation("write", 1, ("run/d.json",), succeeds=True),
    ]

    assert written_in_place(found) == [str(found[1]), str(found[3])]


def test_a_rename_without_sync_is_found():
    """The check of `test_synced_before_it_counts` finds each kind of missing sync."""
    found = [
        Operation("openat", 1, ("run/a.jsonl",), succeeds=True),
        Operation("write", 1, ("run/a.jsonl",), succeeds=True),
        Operation("write", 2, ("run/b.partial/c",), succeeds=True),
        Operation("rename", 1, ("run/b.partial", "run/checkpoint-2"), succeeds=True),
        Operation("rename", 2, ("run/checkpoint-1", "run/b.partial"), succeeds=True),
    ]
    synced = [
        *(found[:3]),
        Operation("fsync", 1, ("run/b.partial/c",), succeeds=True),
        Operation("fsync", 2, ("run/a.jsonl",), succeeds=True),
        Operation("fsync", 3, ("run",), succeeds=True),
        found[3],
        Operation("fsync", 4, ("run",), succeeds=True),
        found[4],
    ]

    assert unsynced_at_commits(synced) == []
    assert [line.rpartition(": ")[2] for line in unsynced_at_commits(found)] == [
        "run/a.jsonl is not synced",
        "run/b.partial/c is not synced",
        "run/checkpoint-2 is not synced",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("command", ["plot", "report", "verify"])
def test_a_command_writes_no_file_in_place(first_run, command):
    """The page and the picture of a run are complete or absent; a check writes nothing."""
    folder = first_run.finished("finished")
    assert first_run.run(folder, (command, "run"), trace_arguments) == 0, first_run.output(folder)
    found = first_run.trace(folder)
    assert written_in_place(found) == []
    assert bool(found) == (command != "verify")


def test_a_sample(first_run):
    """A run that is crashed at its second checkpoint, or by its last record, resumes the same."""
    moves = [each for each in first_run.operations if each.paths[-1] == "run/checkpoint-4"]
    writes = [each for each in first_run.operations if each.paths == ("run/metrics.jsonl",)]
    assert faults(first_run, "killed", moves[:1]) == []
    assert faults(first_run, "failed", writes[-1:]) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_killed_at_each_operation(first_run, part):
    """Wherever a run is killed, it resumes to the same files."""
    points = list(kill_points(first_run.operations))
    assert faults(first_run, "killed", points[part::PARTS]) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(PARTS))
def test_each_operation_fails(first_run, part):
    """Whichever operation fails, the run names the file and resumes to the same files."""
    assert faults(first_run, "failed", first_run.operations[part::PARTS]) == []


def copied(run: Path) -> Callable[[Path], None]:
    """Return a function that copies a run folder into a new current folder."""
    return lambda folder: shutil.copytree(run, folder / "run")


@pytest.fixture(scope="module")
def resumed_run(fork_server, tmp_path_factory, first_run):
    """Return crashes of a run that resumes after a kill during its second checkpoint."""
    (move,) = [each for each in first_run.operations if each.paths[-1] == "run/checkpoint-4"]
    killed, _ = first_run.crashed("killed", move, "signal=KILL")
    folder = tmp_path_factory.mktemp("resumed")
    return Crashes(fork_server, folder, further=("--resume",), begin=copied(killed / "run"))


@pytest.fixture(scope="module")
def repeated_run(fork_server, tmp_path_factory):
    """Return crashes of a run that resumes from an older checkpoint of its folder."""
    folder = tmp_path_factory.mktemp("repeated")
    settings = ("--set", "callbacks.2.keep_checkpoint_max=2")
    finished = Crashes(fork_server, folder, settings=settings).finished("finished")
    resume = ("--resume", "run/checkpoint-2")
    begin = copied(finished / "run")
    return Crashes(fork_server, folder, settings=settings, further=resume, begin=begin)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["killed", "failed"])
def test_crashed_while_it_begins(resumed_run, kind):
    """A resumed run that is crashed before its next checkpoint resumes to the same files."""
    first = before(resumed_run, "checkpoint-4/")
    assert faults(resumed_run, kind, first) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["killed", "failed"])
def test_crashed_while_it_repeats_steps(repeated_run, kind):
    """A run that resumes from an older checkpoint and is crashed loses no step and no record."""
    assert faults(repeated_run, kind, before(repeated_run, "partial/checkpoint-4")) == []


@pytest.fixture(scope="module", params=range(2))
def rank_of_two(fork_server, tmp_path_factory, request):
    """Return crashes of one rank of a run on two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    return Crashes(fork_server, folder, num_ranks=2, rank=request.param)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", range(2))
def test_a_rank_is_killed_after_each_kind_of_operation(rank_of_two, part):
    """Wherever one of two ranks is killed, both resume to the same files."""
    points = kinds_of_kill_points(rank_of_two.operations)
    assert faults(rank_of_two, "killed", points[part::2]) == []


@pytest.fixture(scope="module", params=[1, 2], ids=["one rank", "two ranks"])
def background_run(fork_server, tmp_path_factory, request):
    """Return crashes of a run that saves in the background."""
    folder = tmp_path_factory.mktemp("background")
    return Crashes(fork_server, folder, num_ranks=request.param, in_background=True)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["killed", "failed"])
def test_crashed_with_saves_in_the_background(background_run, kind):
    """Whichever kind of operation crashes a run, of its thread or not, it resumes the same."""
    points = kinds_of_kill_points(background_run.operations)
    assert any("_checkpoint-4.partial/checkpoint-4/optimizer.pt" in str(each) for each in points)
    assert faults(background_run, kind, points) == []


@pytest.fixture(scope="module")
def overwriting_run(fork_server, tmp_path_factory):
    """Return crashes of a run that overwrites a longer one with files of every kind."""
    settings = ("--set", "callbacks.2.keep_checkpoint_max=3", "--set", "training.max_steps=6")
    longer = Crashes(fork_server, tmp_path_factory.mktemp("longer"), settings=settings)
    folder = longer.finished("finished")
    for command in (
        (*longer.command, "--resume", "run/checkpoint-4"),  # sets checkpoint-6 aside
        ("plot", "run"),
        ("report", "run"),
    ):
        assert longer.run(folder, command) == 0, longer.output(folder)
    begin = copied(folder / "run")
    folder = tmp_path_factory.mktemp("new")
    return Crashes(fork_server, folder, further=("--overwrite",), begin=begin)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_overwritten(first_run, overwriting_run):
    """A run that overwrites another one has the files of a run in an empty folder.

    The result is removed first: from then on, the earlier run does not count as finished. The
    newest checkpoint is removed last, and then the records: the earlier run can be resumed to its
    end until then.
    """
    beginning = before(overwriting_run, "partial/checkpoint-2")
    removed = [
        each.paths[0]
        for each in beginning
        if each.call in {"rename", "unlink"}
        and not each.paths[0].startswith(("run/_mfwrap.lock", "run/_mfwrap_files"))
    ]
    assert removed[0] == "run/result.json"
    assert set(removed[1:4]) == {"run/_abandoned-checkpoint-6", "run/model", "run/model_ema"}
    assert removed[4:7] == ["run/checkpoint-2", "run/checkpoint-4", "run/checkpoint-6"]
    assert differences(first_run.expected, overwriting_run.expected) == []
    assert overwriting_run.names == first_run.names


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["killed", "failed"])
def test_crashed_while_it_overwrites(overwriting_run, kind):
    """A run that is crashed before its first checkpoint can be started again."""
    found = before(overwriting_run, "partial/checkpoint-2")
    last_of_each_kind = {each.kind: each for each in found}.values()
    points = kinds_of_kill_points(found) if kind == "killed" else last_of_each_kind
    assert faults(overwriting_run, kind, points) == []
