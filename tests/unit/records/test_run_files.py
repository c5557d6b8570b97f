"""Record files are committed with a checkpoint, and a resumed training continues them there."""

import contextlib
import json
import os
import re
import shutil
import tempfile
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.checkpoints.locks import RUN_LOCK
from mfwrap.checkpoints.ownership import OwnedFolders
from mfwrap.checkpoints.written_files import LIST, listed_names
from mfwrap.records import run_files
from mfwrap.records.json_lines import JsonLines, read_json_lines
from mfwrap.records.run_files import (
    RunFiles,
    open_records,
    owning_record_folders,
    records_of_training,
    save_records,
)

RECORDS = "mfwrap_records_0.json"


def steps_in(path):
    """Return the steps of a file's records; an empty list if there is no file."""
    return [record["step"] for record in read_json_lines(path)] if path.exists() else []


def append(lines, steps):
    """Append a record for each step."""
    for step in steps:
        lines.append({"step": step, "loss": step / 7})


def resumed(checkpoint, step, *, run_folder=None):
    """Return the record files of a new process that resumes from a checkpoint."""
    files = RunFiles()
    files.resume(checkpoint, run_folder=run_folder, global_step=step)
    return files


def state(folder):
    """Return all names below a folder, with their kinds, link targets and contents."""
    return {
        path: (
            path.lstat().st_mode,
            path.readlink() if path.is_symlink() else path.is_file() and path.read_bytes(),
        )
        for path in folder.rglob("*")
    }


@given(
    files=st.dictionaries(
        st.sampled_from(["metrics", "anomalies", "training_state_rank1"]),
        st.tuples(*[st.lists(st.integers(1, 6), max_size=4, unique=True)] * 2),
        min_size=1,
    ),
    in_place=st.booleans(),
    cut=st.integers(0, 20),
)
def test_a_resumed_training_has_each_record_once(files, in_place, cut):
    """Whatever was written after a checkpoint is gone when a resumed training writes it again."""
    with tempfile.TemporaryDirectory() as name:
        folder, first = Path(name), RunFiles()
        paths = {file: folder / f"{file}.jsonl" for file in files}
        lines = {file: first.open(path, 0) for file, path in paths.items()}
        for file, (before, _) in files.items():
            append(lines[file], sorted(before))
        first.save(folder / "checkpoint-6")
        for file, (_, after) in files.items():
            append(lines[file], [6 + step for step in sorted(after)])
            if after:  # a crash of the machine tears the last line
                os.truncate(paths[file], paths[file].stat().st_size - cut)

        again = resumed(folder / "checkpoint-6", 6, run_folder=folder if in_place else None)
        for file, (before, after) in files.items():
            reopened = again.open(paths[file], 6)
            assert steps_in(paths[file]) == sorted(before)
            append(reopened, [6 + step for step in sorted(after)])
            assert steps_in(paths[file]) == sorted(before) + [6 + step for step in sorted(after)]


def test_files_that_nobody_opens_are_cut_and_kept_in_the_list(tmp_path):
    """A resumed run cuts the files of monitors and ranks that it no longer has, and lists them."""
    first = RunFiles()
    lines = first.open(tmp_path / "local_norms.jsonl", 0)
    append(lines, [1, 2])
    first.save(tmp_path / "checkpoint-2")
    append(lines, [3, 4])
    second = resumed(tmp_path / "checkpoint-2", 2, run_folder=tmp_path)
    assert steps_in(tmp_path / "local_norms.jsonl") == [1, 2]
    second.save(tmp_path / "checkpoint-3")

    append(lines, [3, 4])
    resumed(tmp_path / "checkpoint-3", 3, run_folder=tmp_path)
    assert steps_in(tmp_path / "local_norms.jsonl") == [1, 2]


@pytest.mark.parametrize("has_list", [True, False])
def test_a_file_that_a_checkpoint_does_not_list(tmp_path, has_list):
    """Records of later steps are removed by their step; other lines stay as they are."""
    lines = RunFiles().open(tmp_path / "metrics.jsonl", 0)
    lines.append({"max_grad_norm": 1.0})
    append(lines, [1, 2, 3, 4, 3, 5])
    damaged = b"{\xff\n"
    lines.path.write_bytes(damaged + lines.path.read_bytes())
    if has_list:
        RunFiles().save(tmp_path / "checkpoint-3")
    again = resumed(tmp_path / "checkpoint-3", 3, run_folder=tmp_path)
    again.open(lines.path, 3)

    first, *rest = lines.path.read_bytes().splitlines(keepends=True)
    assert first == damaged
    assert [json.loads(line).get("step") for line in rest] == [None, 1, 2, 3, 3]


def test_a_file_of_later_steps_only(tmp_path):
    """A file that began after the checkpoint is gone, as if it had never been written."""
    append(RunFiles().open(tmp_path / "anomalies.jsonl", 0), [4])
    resumed(tmp_path / "checkpoint-3", 3, run_folder=tmp_path).open(tmp_path / "anomalies.jsonl", 3)

    assert [path.name for path in tmp_path.iterdir()] == [LIST]


@pytest.mark.parametrize("kind", ["file", "empty file", "link", "broken link", "folder"])
@pytest.mark.parametrize("first_step", [0, 3])
def test_a_file_of_somebody_else(tmp_path, kind, first_step):
    """It is neither renamed nor cut nor continued; the error names it."""
    path, other = tmp_path / "run" / "metrics.jsonl", tmp_path / "other.jsonl"
    path.parent.mkdir()
    if kind == "folder":
        path.mkdir()
    elif "link" in kind:
        path.symlink_to(other)
    if kind in {"file", "link"}:
        append(JsonLines(other if kind == "link" else path), [1, 5])
    if kind == "empty file":
        path.touch()
    before = state(tmp_path)

    with pytest.raises(
        FileExistsError, match=r"run has metrics\.jsonl, which mfwrap has not written"
    ):
        RunFiles().open(path, first_step)

    assert state(tmp_path) == before


def test_a_link_in_the_place_of_a_committed_file(tmp_path):
    """A resume does not cut the file that a link points to."""
    first = RunFiles()
    lines = first.open(tmp_path / "metrics.jsonl", 0)
    append(lines, [1, 2])
    first.save(tmp_path / "checkpoint-2")
    append(lines, [3])
    (tmp_path / "metrics.jsonl").rename(tmp_path / "other")
    (tmp_path / "metrics.jsonl").symlink_to("other")

    with pytest.raises(FileExistsError, match=r"metrics\.jsonl, which mfwrap has not written"):
        resumed(tmp_path / "checkpoint-2", 2, run_folder=tmp_path)

    assert steps_in(tmp_path / "other") == [1, 2, 3]


def test_a_committed_file_is_the_runs_own(tmp_path):
    """A checkpoint lists the run's files, also if the folder has no list of them."""
    first = RunFiles()
    lines = first.open(tmp_path / "metrics.jsonl", 0)
    append(lines, [1, 2])
    first.save(tmp_path / "checkpoint-2")
    append(lines, [3])
    (tmp_path / LIST).unlink()

    resumed(tmp_path / "checkpoint-2", 2).open(lines.path, 2)

    assert steps_in(lines.path) == [1, 2]
    assert listed_names(tmp_path) == {"metrics.jsonl", "checkpoint-2"}


@pytest.mark.parametrize("fault", ["shorter", "gone", "other"])
def test_a_file_that_lost_records(tmp_path, fault):
    """One warning names a file that has changed since the checkpoint; later steps are removed."""
    first = RunFiles()
    lines = first.open(tmp_path / "metrics.jsonl", 0)
    append(lines, [1, 2, 3])
    first.save(tmp_path / "checkpoint-3")
    size = lines.path.stat().st_size
    if fault == "shorter":
        os.truncate(lines.path, size - 5)
    elif fault == "gone":
        lines.path.unlink()
    else:
        lines.path.unlink()
        append(JsonLines(lines.path), [1, 3, 4, 5, 6])
    message = f"^{re.escape(str(lines.path))} has changed since .*checkpoint-3 was written"
    with pytest.warns(UserWarning, match=message) as caught:
        again = resumed(tmp_path / "checkpoint-3", 3, run_folder=tmp_path)
    again.open(lines.path, 3).append({"step": 4})

    assert len(caught) == 1
    assert steps_in(lines.path) == {"shorter": [1, 2, 4], "gone": [4], "other": [1, 3, 4]}[fault]


def test_a_training_from_the_start_keeps_an_earlier_runs_file(tmp_path):
    """The earlier run's file is renamed to the first free name, with a warning."""
    path = tmp_path / "metrics.jsonl"
    for run in range(3):
        expected = pytest.warns(UserWarning, match=rf"names of its files now end in \.{run}$")
        with expected if run else contextlib.nullcontext():
            append(RunFiles().open(path, 0), [1, run + 2])

    assert steps_in(path) == [1, 4]
    assert steps_in(tmp_path / "metrics.jsonl.1") == [1, 2]
    assert steps_in(tmp_path / "metrics.jsonl.2") == [1, 3]


def test_a_resume_into_another_folder(tmp_path):
    """The first run's files stay as they are, and the new folder gets files of its own."""
    first = RunFiles()
    lines = first.open(tmp_path / "a" / "metrics.jsonl", 0)
    append(lines, [1, 2])
    first.save(tmp_path / "a" / "checkpoint-2")
    append(lines, [3])
    other = tmp_path / "b" / "metrics.jsonl"
    append(RunFiles().open(other, 0), [1, 2])
    again = resumed(tmp_path / "a" / "checkpoint-2", 2, run_folder=tmp_path / "b")
    with pytest.warns(UserWarning, match="has records of an earlier run"):
        lines_of_branch = again.open(other, 2)
    append(lines_of_branch, [3])
    again.save(tmp_path / "b" / "checkpoint-3")

    assert steps_in(lines.path) == [1, 2, 3]
    assert steps_in(other) == [3]
    assert listed(tmp_path / "b" / "checkpoint-3") == {"metrics.jsonl"}


def test_a_run_folder_that_was_moved(tmp_path):
    """The list names files relative to the run folder, so a moved or copied run resumes, too."""
    first = RunFiles()
    lines = first.open(tmp_path / "a" / "metrics.jsonl", 0)
    append(lines, [1, 2])
    first.save(tmp_path / "a" / "checkpoint-2")
    append(lines, [3])
    moved = Path(shutil.move(tmp_path / "a", tmp_path / "b"))
    resumed(moved / "checkpoint-2", 2, run_folder=moved)

    assert steps_in(moved / "metrics.jsonl") == [1, 2]


def test_lists_of_all_ranks(tmp_path, monkeypatch):
    """Each list is applied by one rank, also if fewer ranks resume; stale lists are ignored."""

    def act_as(rank, number):
        monkeypatch.setattr(run_files, "this_rank", lambda: rank)
        monkeypatch.setattr(run_files, "num_ranks", lambda: number)

    names = [f"training_state_rank{rank}.jsonl" for rank in range(4)]
    for rank in (3, 2, 1, 0):
        act_as(rank, 4 if rank == 3 else 3)  # rank 3 belongs to an earlier save in the same folder
        files = RunFiles()
        lines = files.open(tmp_path / names[rank], 0)
        append(lines, [1, 2])
        files.save(tmp_path / "checkpoint-2")
        append(lines, [3])
    act_as(1, 2)
    resumed(tmp_path / "checkpoint-2", 2, run_folder=tmp_path)
    assert [steps_in(tmp_path / name)[-1] for name in names] == [3, 2, 3, 3]
    act_as(0, 2)
    resumed(tmp_path / "checkpoint-2", 2, run_folder=tmp_path)
    assert [steps_in(tmp_path / name)[-1] for name in names] == [2, 2, 2, 3]


def test_two_monitors_that_open_one_file(tmp_path):
    """A second monitor that opens a file does not cut it again, or rename it."""
    first = RunFiles()
    lines = first.open(tmp_path / "anomalies.jsonl", 0)
    append(lines, [1])
    first.save(tmp_path / "checkpoint-2")
    again = resumed(tmp_path / "checkpoint-2", 2)
    one, other = (again.open(tmp_path / "anomalies.jsonl", 2) for _ in range(2))
    append(one, [3])
    append(other, [4])

    assert steps_in(tmp_path / "anomalies.jsonl") == [1, 3, 4]


@pytest.mark.parametrize(
    "content",
    [
        b"\xff",
        b"[" * 100_000,
        b"[]",
        b'{"format_version": 1, "num_ranks": 1, "files": {"a": {}}}',
        b'{"format_version": 2, "num_ranks": 1, "files": {}}',
    ],
)
def test_a_damaged_list(tmp_path, content):
    """The error names the file."""
    path = tmp_path / "checkpoint-1" / RECORDS
    path.parent.mkdir()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}"):
        RunFiles().resume(path.parent)


def test_a_folder_that_cannot_be_written(tmp_path):
    """Opening a file raises an error that names its folder, before a record is written."""
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / "run"
    with pytest.raises(OSError, match=f"cannot write to the folder {re.escape(str(folder))}: Not"):
        RunFiles().open(folder / "metrics.jsonl", 0)


def test_loops_in_threads(tmp_path):
    """Each loop gives its own folders back, in whatever order loops of other threads begin."""
    has_begun, may_end = threading.Event(), threading.Event()

    def train_meanwhile():
        with owning(tmp_path / "a"):
            open_records(tmp_path / "a" / "metrics.jsonl", 0)
            has_begun.set()
            may_end.wait()

    thread = threading.Thread(target=train_meanwhile)
    with owning(tmp_path / "b"):
        thread.start()
        has_begun.wait()
        open_records(tmp_path / "b" / "metrics.jsonl", 0)
    may_end.set()
    thread.join()
    open_records(tmp_path / "c" / "metrics.jsonl", 0)  # by no loop

    assert not list(tmp_path.glob(f"*/{RUN_LOCK}"))


def test_a_training_lists_its_own_files_alone(tmp_path):
    """An open file of another loop of the process is in no checkpoint of a Trainer's training."""
    other = open_records(tmp_path / "a" / "metrics.jsonl", 0)
    append(other, [1])
    with records_of_training():
        save_records(tmp_path / "b" / "checkpoint-1")
        append(own := open_records(tmp_path / "b" / "metrics.jsonl", 0), [1, 2])
        save_records(tmp_path / "b" / "checkpoint-2")
    save_records(tmp_path / "a" / "checkpoint-1")

    own.append({"step": 3})
    assert listed(tmp_path / "b" / "checkpoint-1") is None
    assert listed(tmp_path / "b" / "checkpoint-2") == {"metrics.jsonl"}
    assert "metrics.jsonl" in listed(tmp_path / "a" / "checkpoint-1")
    assert "../b/metrics.jsonl" not in listed(tmp_path / "a" / "checkpoint-1")


def listed(checkpoint):
    """Return the files that a checkpoint lists; ``None`` if it has no list."""
    path = checkpoint / RECORDS
    return set(json.loads(path.read_text())["files"]) if path.exists() else None


@contextlib.contextmanager
def owning(folder):
    """Own the folders in which files are opened within the block; `folder` is one of them."""
    with contextlib.closing(OwnedFolders()) as owned, owning_record_folders(owned):
        owned.own(folder)
        yield
