"""Checkpoints of a run are set aside or removed whole, and nothing else is."""

import errno
import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.checkpoints.run_folders import (
    checkpoints_of_run,
    remove_checkpoints,
    remove_leftovers,
    set_aside_later_checkpoints,
)
from mfwrap.checkpoints.whole import staging_folder, whole_folder
from mfwrap.checkpoints.written_files import LIST, listed_names, rewrite_list
from support.interrupted_writes import (
    NAME,
    WHOLE,
    Interrupted,
    checkpoint,
    contents,
    interrupt,
    names,
    staged,
)


@given(data=st.data())
def test_removed(tmp_path_factory, data):
    """A killed deletion leaves each checkpoint complete or gone; other checkpoints stay."""
    run = tmp_path_factory.mktemp("run")
    folders = [checkpoint(run / f"checkpoint-{step}") for step in range(4)]
    given_up = data.draw(st.lists(st.sampled_from(folders), unique=True))
    left_over = data.draw(st.booleans())
    if left_over:
        checkpoint(staging_folder(folders[0]) / "removed" / "checkpoint-0")
    with pytest.MonkeyPatch.context() as patch:
        interrupted = interrupt(patch, data.draw(st.integers(0, 40)))
        try:
            remove_checkpoints(given_up, run)
        except Interrupted:
            assert interrupted

    for folder in run.glob("checkpoint-*"):
        assert contents(folder) == WHOLE["new"]
    assert all(folder.exists() for folder in set(folders) - set(given_up))
    remove_leftovers(run)
    if not interrupted:
        assert names(run) == sorted(folder.name for folder in set(folders) - set(given_up))
    assert not list(run.glob("*.partial"))
    shutil.rmtree(run)


def test_a_checkpoint_that_cannot_be_removed(tmp_path, monkeypatch, caplog):
    """It stays, with a warning; the others are removed, and are no longer in the list."""
    rewrite_list(tmp_path, ["checkpoint-2", "checkpoint-4"])
    kept, removed = (checkpoint(tmp_path / f"checkpoint-{step}") for step in (2, 4))
    rename = type(tmp_path).rename

    def refuse(path, target):
        if path == kept:
            raise PermissionError(errno.EACCES, "Permission denied")
        return rename(path, target)

    monkeypatch.setattr(type(tmp_path), "rename", refuse)
    remove_checkpoints([kept, removed], tmp_path)

    assert caplog.messages == [f"cannot delete {kept}: Permission denied"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [LIST, "checkpoint-2"]
    assert listed_names(tmp_path) == {"checkpoint-2"}


def test_removed_while_another_is_written(tmp_path):
    """A checkpoint that is being written stays."""
    removed = checkpoint(tmp_path / NAME)
    written = staged(tmp_path / "checkpoint-3")

    remove_checkpoints([removed], tmp_path)

    assert names(tmp_path) == ["_checkpoint-3.partial"]
    assert contents(written) == WHOLE["new"]


def test_leftovers_of_a_run(tmp_path):
    """What a killed run has left is deleted, and nothing else."""
    for name in ("checkpoint-7", "model", "model_ema"):
        staged(tmp_path / name)
    (tmp_path / "metrics.jsonl.0123456789abcdef.partial").write_text("half")
    kept = ["data.partial", "run.html.0123456789abcdef.partial", "_mine.partial/notes.txt"]
    for name in kept:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")

    remove_leftovers(tmp_path)

    assert contents(tmp_path) == dict.fromkeys(kept, "mine")


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_a_staging_folder_of_somebody_else(tmp_path, kind):
    """It is neither deleted nor written: a folder is refused, and a checkpoint stays."""
    theirs, other = tmp_path / "_checkpoint-4.partial", tmp_path / "other"
    ours = checkpoint(tmp_path / "checkpoint-4")
    other.mkdir()
    (other / "notes.txt").touch()
    if kind == "folder":
        other.rename(theirs)
    elif kind == "file":
        theirs.touch()
    else:
        theirs.symlink_to("other")
    before = theirs.lstat()

    with pytest.raises(FileExistsError, match="is in the way"), whole_folder(ours):
        pass
    remove_checkpoints([ours], tmp_path)
    remove_leftovers(tmp_path)

    assert ours.is_dir()
    assert theirs.lstat().st_ino == before.st_ino
    assert kind == "file" or (theirs / "notes.txt").exists()


def test_later_checkpoints_are_set_aside(tmp_path):
    """Checkpoints of later steps are renamed, and a name that is taken gets a number."""
    for name in ("checkpoint-2", "checkpoint-4", "checkpoint-10", "checkpoint-x", "model"):
        checkpoint(tmp_path / name)

    set_aside_later_checkpoints(checkpoints_of_run(tmp_path), 2)
    checkpoint(tmp_path / "checkpoint-4", "newer")
    aside = set_aside_later_checkpoints(checkpoints_of_run(tmp_path), 2)

    assert aside == [tmp_path / "_abandoned-checkpoint-4.2"]
    assert (aside[0] / "model.bin").read_text() == "newer"
    assert {path.name for path in tmp_path.iterdir()} == {
        "_abandoned-checkpoint-10",
        "_abandoned-checkpoint-4",
        "_abandoned-checkpoint-4.2",
        "checkpoint-2",
        "checkpoint-x",
        "model",
    }
