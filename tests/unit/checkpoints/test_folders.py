"""Files and folders are whole or absent, wherever the process is killed."""

import contextlib
import errno
import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers.trainer_utils import get_last_checkpoint

from mfwrap.checkpoints.folders import (
    adopt_files,
    complete_move,
    move_into_place,
    remove_checkpoints,
    staging_folder,
    whole_file,
    whole_folder,
)

NAME = "checkpoint-2"
CHANGES = ("rename", "replace", "rmdir", "unlink", "mkdir", "fsync")
"""All functions of ``os`` that change names on the disk or sync it."""


class Interrupted(Exception):  # noqa: N818  (stands for a kill, not for an error)
    """Raised where a test kills the process."""


def checkpoint(folder, content="new"):
    """Write a checkpoint with files and a folder, and return its folder."""
    folder.mkdir(parents=True)
    return fill(folder, content)


def fill(folder, content="new"):
    """Write the files of a checkpoint into an empty folder, and return the folder."""
    (folder / "part").mkdir()
    for name in ("model.bin", "state.json", "part/notes.txt"):
        (folder / name).write_text(content)
    return folder


def contents(folder):
    """Return the text of each file of a folder by name."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_text() for path in paths}


def names(folder):
    """Return the names in a folder."""
    return sorted(path.name for path in folder.iterdir())


WHOLE = {
    content: {"model.bin": content, "state.json": content, "part/notes.txt": content}
    for content in ("old", "new")
}


def interrupt(patch, number):
    """Make one change of the disk, counted from 0, and all later ones raise.

    Returns:
        List that is empty until a change has raised.
    """
    interrupted, left = [], [number]

    def replace(name, change) -> None:
        def changed(*args, **keywords):
            left[0] -= 1
            if left[0] < 0:
                interrupted.append(name)
                raise Interrupted
            return change(*args, **keywords)

        patch.setattr(os, name, changed)

    for name in CHANGES:
        replace(name, getattr(os, name))
    return interrupted


def test_moved_into_place(tmp_path):
    """The Trainer never takes the staging folder for a checkpoint, and it is gone at the end."""
    written = checkpoint(staging_folder(tmp_path) / NAME)
    assert get_last_checkpoint(str(tmp_path)) is None

    move_into_place(written, tmp_path / NAME)

    assert names(tmp_path) == [NAME]
    assert contents(tmp_path / NAME) == WHOLE["new"]


def test_an_older_folder_is_replaced(tmp_path):
    """No file of the older folder stays, also after an earlier attempt was killed."""
    final = checkpoint(tmp_path / NAME, "old")
    (final / "stale.txt").write_text("old")
    checkpoint(staging_folder(tmp_path) / "replaced" / NAME, "older")
    written = checkpoint(staging_folder(tmp_path) / NAME)

    move_into_place(written, final)

    assert names(tmp_path) == [NAME]
    assert contents(final) == WHOLE["new"]


@pytest.mark.parametrize("number", range(20))
def test_a_move_that_is_killed(tmp_path, monkeypatch, number):
    """The older or the new folder is whole under the name, at the latest after `complete_move`."""
    final = checkpoint(tmp_path / NAME, "old")
    written = checkpoint(staging_folder(tmp_path) / NAME)
    with monkeypatch.context() as patch:
        interrupted = interrupt(patch, number)
        try:
            move_into_place(written, final)
        except Interrupted:
            assert interrupted

    complete_move(tmp_path)
    assert contents(final) in WHOLE.values()
    if not interrupted:
        assert names(tmp_path) == [NAME]


def test_how_often_a_move_can_be_killed(tmp_path, monkeypatch):
    """The test above covers every change; between the two renames the name is gone."""
    states = []
    for number in range(20):
        folder = tmp_path / str(number)
        final = checkpoint(folder / NAME, "old")
        written = checkpoint(staging_folder(folder) / NAME)
        with monkeypatch.context() as patch:
            interrupted = interrupt(patch, number)
            try:
                move_into_place(written, final)
            except Interrupted:
                states.append(final.exists())
            else:
                states.append(None if interrupted else True)

    assert False in states
    assert states[-1] is True


def test_nothing_to_complete(tmp_path):
    """A half-written checkpoint and half-deleted ones stay in the staging folder."""
    complete_move(tmp_path)
    checkpoint(staging_folder(tmp_path) / NAME)
    checkpoint(staging_folder(tmp_path) / "removed" / "checkpoint-1")

    complete_move(tmp_path)

    assert names(tmp_path) == ["checkpoint.partial"]


def test_a_checkpoint_that_is_there_is_not_replaced_again(tmp_path):
    """A new folder that is in place is not replaced by the older one."""
    checkpoint(tmp_path / NAME)
    checkpoint(staging_folder(tmp_path) / "replaced" / NAME, "old")

    complete_move(tmp_path)

    assert contents(tmp_path / NAME) == WHOLE["new"]


def test_adopted_files(tmp_path):
    """On a node with a disk of its own, the folder becomes the checkpoint."""
    written = checkpoint(staging_folder(tmp_path) / NAME)

    adopt_files(written, tmp_path / NAME)

    assert names(tmp_path) == [NAME]
    assert contents(tmp_path / NAME) == WHOLE["new"]


def test_adopted_files_beside_others(tmp_path):
    """Files of the same name are replaced, and others stay."""
    final = checkpoint(tmp_path / NAME, "old")
    (final / "part" / "other.txt").write_text("old")
    written = checkpoint(staging_folder(tmp_path) / NAME)

    adopt_files(written, final)

    assert names(tmp_path) == [NAME]
    assert contents(final) == WHOLE["new"] | {"part/other.txt": "old"}


@pytest.mark.parametrize("is_there", [True, False])
def test_nothing_to_adopt(tmp_path, is_there):
    """On a shared disk the checkpoint has been moved already; the next one is not touched."""
    if is_there:
        checkpoint(tmp_path / NAME)
    checkpoint(staging_folder(tmp_path) / "checkpoint-3")

    adopt_files(staging_folder(tmp_path) / NAME, tmp_path / NAME)

    assert contents(staging_folder(tmp_path) / "checkpoint-3") == WHOLE["new"]
    assert (tmp_path / NAME).exists() == is_there


@given(data=st.data())
def test_removed(tmp_path_factory, data):
    """Checkpoints are gone or whole, wherever the deletion is killed; others are not touched."""
    run = tmp_path_factory.mktemp("run")
    folders = [checkpoint(run / f"checkpoint-{step}") for step in range(4)]
    given_up = data.draw(st.lists(st.sampled_from(folders), unique=True))
    left_over = data.draw(st.booleans())
    if left_over:
        checkpoint(staging_folder(run) / "removed" / "checkpoint-0")
    with pytest.MonkeyPatch.context() as patch:
        interrupted = interrupt(patch, data.draw(st.integers(0, 40)))
        try:
            remove_checkpoints(given_up, run)
        except Interrupted:
            assert interrupted

    for folder in run.glob("checkpoint-*"):
        assert contents(folder) == WHOLE["new"]
    assert all(folder.exists() for folder in set(folders) - set(given_up))
    if not interrupted:
        assert names(run) == sorted(folder.name for folder in set(folders) - set(given_up))
    shutil.rmtree(run)


def test_removed_while_another_is_written(tmp_path):
    """The staging folder stays if a checkpoint is being written in it."""
    removed = checkpoint(tmp_path / NAME)
    written = checkpoint(staging_folder(tmp_path) / "checkpoint-3")

    remove_checkpoints([removed], tmp_path)

    assert names(tmp_path) == ["checkpoint.partial"]
    assert contents(written) == WHOLE["new"]


@pytest.fixture
def noted(monkeypatch):
    """Return a list that gets each sync and rename, in order."""
    happened = []
    sync = os.fsync

    def noted_sync(opened) -> None:
        happened.append(("synced", Path(f"/proc/self/fd/{opened}").readlink()))
        sync(opened)

    def note_target(rename):
        def noted_rename(source, target) -> None:
            happened.append(("renamed", Path(target)))
            rename(source, target)

        return noted_rename

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "rename", note_target(os.rename))
    monkeypatch.setattr(os, "replace", note_target(os.replace))
    return happened


def test_a_folder_is_synced_before_and_after_its_rename(tmp_path, noted):
    """A folder's files and names are synced before it gets its name, and the name after."""
    written = checkpoint(staging_folder(tmp_path) / NAME)
    all_of_it = {written, *written.rglob("*")}

    move_into_place(written, tmp_path / NAME)

    assert {path for _, path in noted[:-2]} == all_of_it
    assert noted[-2:] == [("renamed", tmp_path / NAME), ("synced", tmp_path)]


def test_a_file_is_synced_before_and_after_its_rename(tmp_path, noted):
    """A file is synced before it gets its name, and the name after."""
    path = tmp_path / "state.json"

    with whole_file(path) as partial:
        partial.write_text("new")

    assert noted == [("synced", partial), ("renamed", path), ("synced", tmp_path)]
    assert path.read_text() == "new"
    assert names(tmp_path) == ["state.json"]


def test_a_file_in_a_new_folder(tmp_path):
    """Missing folders are created."""
    with whole_file(tmp_path / "run" / "state.json") as partial:
        partial.write_text("new")

    assert contents(tmp_path) == {"run/state.json": "new"}


@pytest.mark.parametrize("write", [whole_file, whole_folder])
@pytest.mark.parametrize("is_there", [True, False])
def test_an_exception_while_writing(tmp_path, write, is_there):
    """The temporary file or folder is deleted, and an older one stays."""
    path = tmp_path / NAME
    if is_there:
        checkpoint(path, "old") if write is whole_folder else path.write_text("old")
    before = sorted(tmp_path.rglob("*"))

    def fail() -> None:
        with write(path) as partial:
            if write is whole_file:
                partial.write_text("half")
            else:
                (partial / "half.txt").write_text("half")
            raise Interrupted

    with pytest.raises(Interrupted):
        fail()

    assert sorted(tmp_path.rglob("*")) == before
    assert set(contents(tmp_path).values()) <= {"old"}


@pytest.mark.parametrize("number", range(5))
def test_a_file_whose_writing_is_killed(tmp_path, monkeypatch, number):
    """The older or the new file is whole, and the next call leaves nothing else behind."""
    path = tmp_path / "state.json"
    path.write_text("old")
    with monkeypatch.context() as patch:
        interrupted = interrupt(patch, number)
        try:
            with whole_file(path) as partial:
                partial.write_text("new")
        except Interrupted:
            assert interrupted

    # Create the folder, sync, rename, sync: the fifth change does not come.
    assert bool(interrupted) == (number < 4)
    assert path.read_text() == ("old" if number < 3 else "new")
    with whole_file(path) as partial:
        partial.write_text("newer")
    assert contents(tmp_path) == {"state.json": "newer"}


@pytest.mark.parametrize("number", range(30))
def test_a_folder_whose_writing_is_killed(tmp_path, monkeypatch, number):
    """The older or the new folder is whole, at the latest when the next one is begun."""
    final = checkpoint(tmp_path / NAME, "old")
    with monkeypatch.context() as patch:
        interrupted = interrupt(patch, number)
        try:
            with whole_folder(final) as written:
                fill(written)
        except Interrupted:
            assert interrupted

    with whole_folder(final) as written:
        assert contents(final) in WHOLE.values()
        (written / "newer.txt").write_text("newer")

    assert names(tmp_path) == [NAME]
    assert contents(final) == {"newer.txt": "newer"}


@pytest.mark.parametrize("is_folder", [True, False])
def test_a_file_system_that_cannot_sync_folders(tmp_path, monkeypatch, is_folder):
    """An invalid sync of a folder is ignored, and one of a file is not."""
    sync = os.fsync

    def refuse(opened) -> None:
        if Path(f"/proc/self/fd/{opened}").is_dir() == is_folder:
            raise OSError(errno.EINVAL, "Invalid argument")
        sync(opened)

    monkeypatch.setattr(os, "fsync", refuse)
    expected = contextlib.nullcontext() if is_folder else pytest.raises(OSError, match="Invalid")
    with expected, whole_file(tmp_path / "state.json") as partial:
        partial.write_text("new")

    assert contents(tmp_path) == ({"state.json": "new"} if is_folder else {})
