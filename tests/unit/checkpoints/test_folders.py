"""Checkpoint folders that are moved and removed as wholes, wherever it breaks off."""

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
    sync_folder,
)

NAME = "checkpoint-2"
CHANGES = ("rename", "rmdir", "unlink", "mkdir")
"""All that changes a disk's names here, as functions of ``os``."""


class Interrupted(Exception):  # noqa: N818  (no error of the program's own)
    """What a test lets happen in place of a change."""


def checkpoint(folder, content="new"):
    """Write a checkpoint with files and a folder, and return its folder."""
    (folder / "part").mkdir(parents=True)
    for name in ("model.bin", "state.json", "part/notes.txt"):
        (folder / name).write_text(content)
    return folder


def contents(folder):
    """Return what is in the files of a folder, by name."""
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
    """Let one change of the disk, counted from 0, and all after it, raise instead.

    Returns:
        A list that then has an element.
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
    """The staging folder is gone, and never looked like a checkpoint to the Trainer."""
    written = checkpoint(staging_folder(tmp_path) / NAME)
    assert get_last_checkpoint(str(tmp_path)) is None

    move_into_place(written, tmp_path / NAME)

    assert names(tmp_path) == [NAME]
    assert contents(tmp_path / NAME) == WHOLE["new"]


def test_moved_into_the_place_of_another(tmp_path):
    """What was there is replaced as a whole, also after an attempt that broke off."""
    final = checkpoint(tmp_path / NAME, "old")
    (final / "stale.txt").write_text("old")
    checkpoint(staging_folder(tmp_path) / "replaced" / NAME, "older")
    written = checkpoint(staging_folder(tmp_path) / NAME)

    move_into_place(written, final)

    assert names(tmp_path) == [NAME]
    assert contents(final) == WHOLE["new"]


@pytest.mark.parametrize("number", range(14))
def test_a_move_that_breaks_off(tmp_path, monkeypatch, number):
    """One of the two is whole under the name, wherever it does; or is so once it is completed."""
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


def test_how_often_a_move_can_break_off(tmp_path, monkeypatch):
    """As often as the test above lets it, and no more; between its renames the name is gone."""
    states = []
    for number in range(14):
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
    """What a process was in the middle of writing stays where it is; so does all else."""
    complete_move(tmp_path)
    checkpoint(staging_folder(tmp_path) / NAME)
    checkpoint(staging_folder(tmp_path) / "removed" / "checkpoint-1")

    complete_move(tmp_path)

    assert names(tmp_path) == ["checkpoint.partial"]


def test_a_checkpoint_that_is_there_is_not_replaced_again(tmp_path):
    """A process that ended while it cleaned up has left no work."""
    checkpoint(tmp_path / NAME)
    checkpoint(staging_folder(tmp_path) / "replaced" / NAME, "old")

    complete_move(tmp_path)

    assert contents(tmp_path / NAME) == WHOLE["new"]


def test_adopted_files(tmp_path):
    """Of a node with a disk of its own, the folder becomes the checkpoint."""
    written = checkpoint(staging_folder(tmp_path) / NAME)

    adopt_files(written, tmp_path / NAME)

    assert names(tmp_path) == [NAME]
    assert contents(tmp_path / NAME) == WHOLE["new"]


def test_adopted_files_beside_others(tmp_path):
    """What is there under the same names is replaced, and nothing else."""
    final = checkpoint(tmp_path / NAME, "old")
    (final / "part" / "other.txt").write_text("old")
    written = checkpoint(staging_folder(tmp_path) / NAME)

    adopt_files(written, final)

    assert names(tmp_path) == [NAME]
    assert contents(final) == WHOLE["new"] | {"part/other.txt": "old"}


@pytest.mark.parametrize("is_there", [True, False])
def test_nothing_to_adopt(tmp_path, is_there):
    """On a shared disk the checkpoint has been moved, and its next one may be in the making."""
    if is_there:
        checkpoint(tmp_path / NAME)
    checkpoint(staging_folder(tmp_path) / "checkpoint-3")

    adopt_files(staging_folder(tmp_path) / NAME, tmp_path / NAME)

    assert contents(staging_folder(tmp_path) / "checkpoint-3") == WHOLE["new"]
    assert (tmp_path / NAME).exists() == is_there


@given(data=st.data())
def test_removed(tmp_path_factory, data):
    """Those that are named are gone, the others whole; so it is wherever it breaks off."""
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


def test_removed_beside_what_is_written(tmp_path):
    """The staging folder stays if it is in use."""
    removed = checkpoint(tmp_path / NAME)
    written = checkpoint(staging_folder(tmp_path) / "checkpoint-3")

    remove_checkpoints([removed], tmp_path)

    assert names(tmp_path) == ["checkpoint.partial"]
    assert contents(written) == WHOLE["new"]


@pytest.fixture
def noted(monkeypatch):
    """Return a list that gets what is put on the disk, and what is renamed, in order."""
    happened = []
    sync, rename = os.fsync, os.rename

    def noted_sync(opened) -> None:
        happened.append(("on disk", Path(f"/proc/self/fd/{opened}").readlink()))
        sync(opened)

    def noted_rename(source, target) -> None:
        happened.append(("renamed", Path(target)))
        rename(source, target)

    monkeypatch.setattr(os, "fsync", noted_sync)
    monkeypatch.setattr(os, "rename", noted_rename)
    return happened


def test_on_the_disk(tmp_path, noted):
    """All files, and the names in all folders."""
    folder = checkpoint(tmp_path / NAME)

    sync_folder(folder)

    assert sorted(path for _, path in noted) == sorted([folder, *folder.rglob("*")])


def test_a_name_on_the_disk(tmp_path, noted):
    """When a checkpoint has its name, so has the disk."""
    move_into_place(checkpoint(staging_folder(tmp_path) / NAME), tmp_path / NAME)

    assert noted == [("renamed", tmp_path / NAME), ("on disk", tmp_path)]
