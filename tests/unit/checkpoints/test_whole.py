"""A file or folder is complete or absent, no matter when the process is killed."""

import contextlib
import errno
import os
from pathlib import Path

import pytest
from transformers.trainer_utils import get_last_checkpoint

from mfwrap.checkpoints.whole import (
    adopt_files,
    complete_move,
    move_into_place,
    staging_folder,
    whole_file,
    whole_folder,
)
from support.interrupted_writes import (
    NAME,
    WHOLE,
    Interrupted,
    checkpoint,
    contents,
    fill,
    interrupt,
    names,
    staged,
)


def test_moved_into_place(tmp_path):
    """The Trainer finds no checkpoint in the staging folder, and the move removes that folder."""
    written = staged(tmp_path / NAME)
    assert get_last_checkpoint(str(tmp_path)) is None

    move_into_place(written, tmp_path / NAME)

    assert names(tmp_path) == [NAME]
    assert contents(tmp_path / NAME) == WHOLE["new"]


def test_an_older_folder_is_replaced(tmp_path):
    """A move replaces the older folder with all its files, even if an earlier move was killed."""
    final = checkpoint(tmp_path / NAME, "old")
    (final / "stale.txt").write_text("old")
    checkpoint(staging_folder(final) / "replaced" / NAME, "older")
    written = staged(final)

    move_into_place(written, final)

    assert names(tmp_path) == [NAME]
    assert contents(final) == WHOLE["new"]


@pytest.mark.parametrize("number", range(20))
def test_a_move_that_is_killed(tmp_path, monkeypatch, number):
    """After a killed move and `complete_move`, the older or the new checkpoint is complete."""
    final = checkpoint(tmp_path / NAME, "old")
    written = staged(final)
    with monkeypatch.context() as patch:
        interrupted = interrupt(patch, number)
        try:
            move_into_place(written, final)
        except Interrupted:
            assert interrupted

    complete_move(final)
    assert contents(final) in WHOLE.values()
    if not interrupted:
        assert names(tmp_path) == [NAME]


def test_how_often_a_move_can_be_killed(tmp_path, monkeypatch):
    """The kills in the test above cover every change that a move makes on the disk.

    One kill is between the two renames, when no folder has the final name.
    """
    states = []
    for number in range(20):
        folder = tmp_path / str(number)
        final = checkpoint(folder / NAME, "old")
        written = staged(final)
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
    """`complete_move` leaves half-written and half-deleted checkpoints in the staging folder."""
    complete_move(tmp_path / NAME)
    staged(tmp_path / NAME)
    checkpoint(staging_folder(tmp_path / NAME) / "removed" / NAME)

    complete_move(tmp_path / NAME)

    assert names(tmp_path) == [f"_{NAME}.partial"]


def test_a_checkpoint_that_is_there_is_not_replaced_again(tmp_path):
    """`complete_move` does not replace a new checkpoint with the older one."""
    checkpoint(tmp_path / NAME)
    checkpoint(staging_folder(tmp_path / NAME) / "replaced" / NAME, "old")

    complete_move(tmp_path / NAME)

    assert contents(tmp_path / NAME) == WHOLE["new"]


def test_adopted_files(tmp_path):
    """On a node with a separate disk, the staged folder becomes the checkpoint."""
    written = staged(tmp_path / NAME)

    adopt_files(written, tmp_path / NAME)

    assert names(tmp_path) == [NAME]
    assert contents(tmp_path / NAME) == WHOLE["new"]


def test_adopted_files_beside_others(tmp_path):
    """Adopted files replace files of the same name; the checkpoint's other files stay."""
    final = checkpoint(tmp_path / NAME, "old")
    (final / "part" / "other.txt").write_text("old")
    written = staged(tmp_path / NAME)

    adopt_files(written, final)

    assert names(tmp_path) == [NAME]
    assert contents(final) == WHOLE["new"] | {"part/other.txt": "old"}


@pytest.mark.parametrize("is_there", [True, False])
def test_nothing_to_adopt(tmp_path, is_there):
    """If the staged folder has already been moved, nothing is adopted and other folders stay."""
    if is_there:
        checkpoint(tmp_path / NAME)
    other = staged(tmp_path / "checkpoint-3")

    adopt_files(staging_folder(tmp_path / NAME) / NAME, tmp_path / NAME)

    assert contents(other) == WHOLE["new"]
    assert (tmp_path / NAME).exists() == is_there


@pytest.fixture
def noted(monkeypatch):
    """Return a list to which each sync and rename is appended."""
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
    """A folder and all its files are synced before the rename, and the parent folder after it."""
    written = staged(tmp_path / NAME)
    all_of_it = {written, *written.rglob("*")}

    move_into_place(written, tmp_path / NAME)

    assert {path for _, path in noted[:-2]} == all_of_it
    assert noted[-2:] == [("renamed", tmp_path / NAME), ("synced", tmp_path)]


def test_a_file_is_synced_before_and_after_its_rename(tmp_path, noted):
    """A file is synced before the rename, and its folder after it."""
    path = tmp_path / "state.json"

    with whole_file(path) as partial:
        partial.write_text("new")

    assert noted == [("synced", partial), ("renamed", path), ("synced", tmp_path)]
    assert path.read_text() == "new"
    assert names(tmp_path) == ["state.json"]


def test_a_file_in_a_new_folder(tmp_path):
    """`whole_file` creates missing folders."""
    with whole_file(tmp_path / "run" / "state.json") as partial:
        partial.write_text("new")

    assert contents(tmp_path) == {"run/state.json": "new"}


@pytest.mark.parametrize("write", [whole_file, whole_folder])
@pytest.mark.parametrize("is_there", [True, False])
def test_an_exception_while_writing(tmp_path, write, is_there):
    """If writing raises, the temporary file or folder is deleted, and an older one stays."""
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
    """After a killed write, the older or the new file is complete, and the next write succeeds.

    A temporary file that is left is deleted by the next run, or by a write an hour later.
    """
    path = tmp_path / "state.json"
    path.write_text("old")
    with monkeypatch.context() as patch:
        interrupted = interrupt(patch, number)
        try:
            with whole_file(path) as partial:
                partial.write_text("new")
        except Interrupted:
            assert interrupted

    # A write makes four changes: create the folder, sync, rename, sync. An interruption at a later
    # change never occurs.
    assert bool(interrupted) == (number < 4)
    assert path.read_text() == ("old" if number < 3 else "new")
    for left in tmp_path.glob("*.partial"):
        os.utime(left, (0, 0))
    with whole_file(path) as partial:
        partial.write_text("newer")
    assert contents(tmp_path) == {"state.json": "newer"}


def test_a_link_under_a_temporary_name_is_not_followed(tmp_path):
    """Files of others beside a file that is written stay, whatever their names are."""
    mine = tmp_path / "mine.txt"
    mine.write_text("mine")
    others = ["run.html.partial", "run.html.0123456789abcdef.partial", "run.html.tmp"]
    for name in others:
        (tmp_path / name).symlink_to(mine)

    with whole_file(tmp_path / "run.html") as partial:
        assert partial.read_text() == ""
        partial.write_text("new")

    expected = {"mine.txt": "mine", **dict.fromkeys(others, "mine"), "run.html": "new"}
    assert contents(tmp_path) == expected


def test_two_writers_of_one_file(tmp_path):
    """Two programs that write the same file at the same time do not disturb each other."""
    path = tmp_path / "run.html"

    with whole_file(path) as first, whole_file(path) as second:
        first.write_text("first")
        second.write_text("second")

    assert contents(tmp_path) == {"run.html": "first"}


def test_a_new_file_has_the_usual_permissions(tmp_path):
    """A file gets the permissions that ``open`` would give it."""
    (tmp_path / "usual").touch()
    with whole_file(tmp_path / "whole") as partial:
        partial.write_text("new")

    assert (tmp_path / "whole").stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_two_folders_are_written_beside_each_other(tmp_path):
    """A folder that is written stays whole while another program writes one beside it."""
    with whole_folder(tmp_path / "a") as first:
        fill(first)
        with whole_folder(tmp_path / "b") as second:
            fill(second)

    assert names(tmp_path) == ["a", "b"]
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == WHOLE["new"]


@pytest.mark.parametrize("number", range(30))
def test_a_folder_whose_writing_is_killed(tmp_path, monkeypatch, number):
    """After a killed write, the older or the new folder is complete once the next write begins."""
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
    """If a sync is not supported, the error is ignored for a folder and raised for a file."""
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
