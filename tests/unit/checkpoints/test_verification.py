"""Damaged checkpoints are refused, and the newest intact checkpoint is offered."""

import functools
import os
import warnings

import pytest
import torch
from torch import nn

from mfwrap.checkpoints import verification
from mfwrap.checkpoints.manifest import write_manifest
from mfwrap.checkpoints.network_weights import foreign_weights
from mfwrap.checkpoints.verification import (
    check_checkpoint,
    checkpoints_in,
    newest_whole_checkpoint,
    verify,
    verify_of_run,
)
from support.checkpoint_folders import MANIFEST, write_checkpoint


def flip(path):
    """Flip the last bit of a file."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def refused(folder, problem="cannot resume from", **keywords):
    """Return the reason why a checkpoint is refused."""
    with pytest.raises(ValueError, match=problem) as caught:
        check_checkpoint(folder, **keywords)
    assert str(caught.value).startswith(f"{problem} {folder}: ")
    reason, _, offer = str(caught.value).removeprefix(f"{problem} {folder}: ").partition("; ")
    return reason, offer


NOT_FOUND = "Can't find a valid checkpoint at"
NONE_BEFORE = "there is no intact checkpoint before it"


def test_an_intact_checkpoint(tmp_path):
    """An intact checkpoint passes, with a manifest or as a stock Trainer writes it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_checkpoint(write_checkpoint(tmp_path / "checkpoint-1"))
        check_checkpoint(write_checkpoint(tmp_path / "checkpoint-2", listed=False))

    assert newest_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-2"


@pytest.mark.parametrize("becomes", ["deleted", "replaced", "damaged"])
def test_a_checkpoint_of_a_run_that_goes_on(tmp_path, monkeypatch, becomes):
    """A checkpoint that its run deletes or replaces while it is read is not called damaged."""
    folder = write_checkpoint(tmp_path / "checkpoint-1")
    read = verification.verify_by_manifest

    def read_later(checkpoint):
        monkeypatch.undo()
        if becomes == "damaged":
            flip(checkpoint / "model.safetensors")
            return read(checkpoint)
        checkpoint.rename(tmp_path / "old")
        if becomes == "replaced":
            write_checkpoint(checkpoint)
        flip(tmp_path / "old" / "model.safetensors")  # the run has begun to delete it
        return read(tmp_path / "old")

    monkeypatch.setattr(verification, "verify_by_manifest", read_later)
    if becomes == "damaged":
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
            verify_of_run(folder)
    elif becomes == "deleted":
        assert verify_of_run(folder) is None
    else:
        assert verify_of_run(folder) == verify(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "part/notes.txt", MANIFEST])
def test_a_flipped_bit(tmp_path, name):
    """A flipped bit is found by content; the error names the file and the newest intact one."""
    for step in (3, 20):
        write_checkpoint(tmp_path / f"checkpoint-{step}")
    flip(tmp_path / "checkpoint-20" / name)

    reason, offer = refused(tmp_path / "checkpoint-20")

    assert reason.startswith(f"{name} is ")
    assert offer == f"newest intact checkpoint before it: {tmp_path / 'checkpoint-3'}"


@pytest.mark.parametrize("kind", ["none", "file"])
def test_no_folder(tmp_path, kind):
    """A missing folder is refused, and so is a file with the name of the checkpoint."""
    if kind == "file":
        (tmp_path / "checkpoint-1").write_text("a file")

    reason = ("there is no such folder", NONE_BEFORE)
    assert refused(tmp_path / "checkpoint-1", NOT_FOUND) == reason


def test_a_folder_without_a_checkpoint(tmp_path):
    """If a file is required and nothing in the folder is of a checkpoint, the path is wrong."""
    required = ["trainer_state.json"]
    folder = write_checkpoint(tmp_path / "checkpoint-1", listed=False)
    (folder / "trainer_state.json").unlink()

    reason = ("trainer_state.json is missing", NONE_BEFORE)
    assert refused(folder, NOT_FOUND, required=required) == reason
    write_manifest(folder)
    assert refused(folder, required=required) == reason


def test_required_files(tmp_path):
    """A checkpoint without a required file is refused, also if it is empty."""
    (tmp_path / "checkpoint-1").mkdir()
    check_checkpoint(tmp_path / "checkpoint-1")

    reason, _ = refused(tmp_path / "checkpoint-1", NOT_FOUND, required=["trainer_state.json"])
    assert reason == "trainer_state.json is missing"


@pytest.mark.parametrize("says", [True, False])
def test_a_manifest_that_is_missing(tmp_path, says):
    """A checkpoint without its manifest is refused if it must have had one.

    That is so if a JSON file of mfwrap says that there is a manifest, or if a Trainer's checkpoint
    has files of mfwrap.
    """
    folder = write_checkpoint(tmp_path / "checkpoint-1", listed=False)
    (folder / "mfwrap_step.json").write_text('{"has_manifest": true}' if says else "{}")
    if says:
        (folder / "trainer_state.json").unlink()

    assert refused(folder) == (f"{MANIFEST} is missing", NONE_BEFORE)


def test_an_accelerate_loop_of_an_earlier_version(tmp_path):
    """A checkpoint of an accelerate loop without a manifest is accepted, with a warning."""
    folder = write_checkpoint(tmp_path / "step_1", listed=False)
    (folder / "mfwrap_step.json").write_text("{}")
    (folder / "trainer_state.json").unlink()

    warning = "damage in .*step_1 may be unnoticed, because it has no manifest"
    with pytest.warns(UserWarning, match=warning) as caught:
        check_checkpoint(folder)

    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_the_newest_intact_checkpoint(tmp_path):
    """The newest intact checkpoint is found; damaged checkpoints and other folders are skipped."""
    for name in ("checkpoint-9", "checkpoint-10", "checkpoint-11", "checkpoint-12", "checkpoint-x"):
        write_checkpoint(tmp_path / name)
    (tmp_path / "checkpoint-11" / "optimizer.pt").unlink()
    flip(tmp_path / "checkpoint-12" / "model.safetensors")
    (tmp_path / "checkpoint-13").write_text("a file")
    (tmp_path / "checkpoint-14").mkdir()
    write_checkpoint(tmp_path / "other-checkpoint-99")

    assert newest_whole_checkpoint(tmp_path) == tmp_path / "checkpoint-10"
    before = tmp_path / "checkpoint-10"
    assert newest_whole_checkpoint(tmp_path, before=before) == tmp_path / "checkpoint-9"
    assert newest_whole_checkpoint(tmp_path, before=tmp_path / "checkpoint-9") is None
    assert newest_whole_checkpoint(tmp_path / "nowhere") is None
    assert refused(tmp_path / "checkpoint-12")[1].endswith(f" {tmp_path / 'checkpoint-10'}")


def test_the_newest_checkpoint_of_a_network(tmp_path):
    """Checkpoints of another network are not offered."""
    network = nn.Linear(3, 2)
    write_checkpoint(tmp_path / "checkpoint-1", weights=network.state_dict())
    write_checkpoint(tmp_path / "checkpoint-2")
    write_checkpoint(tmp_path / "checkpoint-3", weights={"weight": torch.ones(1)})

    reason, offer = refused(
        tmp_path / "checkpoint-3", refusal=functools.partial(foreign_weights, network=network)
    )

    assert reason.startswith("model.safetensors has weight with shape [1], but ")
    assert offer == (
        "build the model as in the run of the checkpoint, or start a new run; newest intact "
        f"checkpoint before it: {tmp_path / 'checkpoint-1'}"
    )


def test_a_search_reads_no_older_checkpoints(tmp_path, monkeypatch):
    """The search stops at the first intact checkpoint, so its cost is the read of that one."""
    read, verify_by_manifest = [], verification.verify_by_manifest

    def noted(folder):
        read.append(folder.name)
        return verify_by_manifest(folder)

    monkeypatch.setattr(verification, "verify_by_manifest", noted)
    for step in range(1, 5):
        write_checkpoint(tmp_path / f"checkpoint-{step}")

    newest_whole_checkpoint(tmp_path, before=tmp_path / "checkpoint-4")

    assert read == ["checkpoint-3"]


@pytest.mark.parametrize("prefix", ["checkpoint_", "step_", "epoch 2, step "])
def test_checkpoints_of_a_loop(tmp_path, prefix):
    """Checkpoints whose names differ only in their number belong together."""
    for step in (5, 10, 100):
        write_checkpoint(tmp_path / f"{prefix}{step}")
    write_checkpoint(tmp_path / "checkpoint-50")
    flip(tmp_path / f"{prefix}100" / "optimizer.pt")

    assert refused(tmp_path / f"{prefix}100")[1].endswith(f": {tmp_path / f'{prefix}10'}")


def test_a_checkpoint_under_another_name(tmp_path):
    """If the name of a damaged checkpoint has no step, the error offers the newest intact one."""
    write_checkpoint(tmp_path / "checkpoint-4")
    folder = write_checkpoint(tmp_path / "kept")
    check_checkpoint(folder)
    flip(folder / "optimizer.pt")

    assert refused(folder)[1].endswith(f": {tmp_path / 'checkpoint-4'}")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_must_not_be_read(tmp_path):
    """A file that the operating system does not let us read is named in one sentence."""
    folder = write_checkpoint(tmp_path / "checkpoint-1")
    (folder / "optimizer.pt").chmod(0)

    with pytest.raises(ValueError, match=r"^optimizer\.pt cannot be read \(Permission denied\)$"):
        verify(folder)


def test_a_file_that_cannot_be_read(tmp_path, monkeypatch):
    """An error of the disk is one sentence that names the file."""
    folder = write_checkpoint(tmp_path / "checkpoint-1")

    def broken(path):
        raise OSError(5, "Input/output error", str(path / "part" / "notes.txt"))

    monkeypatch.setattr(verification, "verify_by_manifest", broken)

    with pytest.raises(ValueError, match=r"^part/notes\.txt cannot be read \(Input/output error\)"):
        verify(folder)


def test_checkpoints_in_a_run_folder(tmp_path):
    """Checkpoints are found in the order of their numbers, also in subfolders."""
    names = ["checkpoint-2", "checkpoint-10", "trial/checkpoint-1"]
    for name in names:
        write_checkpoint(tmp_path / name)
    write_checkpoint(tmp_path / "_checkpoint-11.partial" / "checkpoint-11")
    (tmp_path / "model").mkdir()
    (tmp_path / "trainer_state.json").write_text("{}")

    assert checkpoints_in(tmp_path) == [tmp_path / name for name in names]
    assert checkpoints_in(tmp_path / "checkpoint-2") == [tmp_path / "checkpoint-2"]
    assert checkpoints_in(tmp_path / "model") == []


@pytest.mark.parametrize("error", [FileNotFoundError, PermissionError])
def test_a_folder_that_cannot_be_searched(tmp_path, monkeypatch, error):
    """A folder that is deleted meanwhile is ignored; one that cannot be read is an error."""
    write_checkpoint(tmp_path / "checkpoint-2")
    (tmp_path / "trial").mkdir()
    scan = os.scandir

    def scan_others(path):
        if str(path).endswith("trial"):
            raise error(13, "no access", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scan_others)

    if error is PermissionError:
        with pytest.raises(PermissionError, match="trial"):
            checkpoints_in(tmp_path)
    else:
        assert checkpoints_in(tmp_path) == [tmp_path / "checkpoint-2"]
