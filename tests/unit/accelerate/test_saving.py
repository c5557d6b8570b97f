"""`save_state` of an attached accelerator never leaves a loop without a complete checkpoint."""

import re
import shutil
from pathlib import Path

import pytest
import torch
from accelerate.utils import ProjectConfiguration

from mfwrap.checkpoints.locks import lock_of
from mfwrap.checkpoints.verification import verify
from mfwrap.checkpoints.whole import staging_folder
from support.attached_runs import AttachedRun, RunSettings
from support.programs import Program
from support.ranks.saving import save_in_one_folder, save_with_limit
from support.training_state import assert_same_state


class Breaking:
    """An object whose state cannot be saved; accelerate saves it last."""

    def state_dict(self):
        """Raise an error."""
        raise InterruptedError

    def load_state_dict(self, state):
        """Do nothing."""


def interrupted_save(run, *arguments):
    """Save again, and break off after accelerate has written weights and optimizer."""
    run.accelerator.register_for_checkpointing(Breaking())
    with pytest.raises(InterruptedError):
        run.accelerator.save_state(*arguments)
    run.accelerator._custom_objects.clear()


def test_an_interrupted_save_into_the_same_folder(tmp_path):
    """The older checkpoint stays complete until the new one is complete."""
    run = AttachedRun()
    run.train(0, 1)
    run.accelerator.save_state(tmp_path / "latest")
    saved = run.state()
    run.train(1, 3)
    interrupted_save(run, tmp_path / "latest")

    run.accelerator.load_state(tmp_path / "latest")
    assert_same_state(saved, run.state())
    run.train(1, 2)
    assert run.accelerator.save_state(tmp_path / "latest") == tmp_path / "latest"
    newer = run.state()
    run.accelerator.load_state(tmp_path / "latest")
    assert_same_state(newer, run.state())
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_a_file_of_an_interrupted_save(tmp_path):
    """What a run with another optimizer left half-saved does not come into the checkpoint."""
    rest = staging_folder(tmp_path / "a") / "a" / "optimizer_1.bin"
    rest.parent.mkdir(parents=True)
    rest.write_bytes(b"")
    run = AttachedRun()

    run.accelerator.save_state(tmp_path / "a")

    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert not (tmp_path / "a" / rest.name).exists()


def test_an_interrupted_save_with_a_limit(tmp_path):
    """Checkpoints beyond `total_limit` are deleted after the new one is complete."""
    project = ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=1
    )
    run = AttachedRun(project_config=project)
    run.accelerator.save_state()
    interrupted_save(run)

    checkpoints = tmp_path / "checkpoints"
    assert [path.name for path in checkpoints.iterdir()] == ["checkpoint_0"]
    run.accelerator.load_state()
    assert run.accelerator.save_state() == checkpoints / "checkpoint_1"
    assert [path.name for path in checkpoints.iterdir()] == ["checkpoint_1"]
    assert verify(checkpoints / "checkpoint_1").caveat is None
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]
    project.iteration = 1
    with pytest.raises(ValueError, match="checkpoint_1 already exists; set"):
        run.accelerator.save_state()


def test_checkpoints_of_accelerate_alone_do_not_count(tmp_path):
    """`total_limit` neither deletes them nor keeps fewer checkpoints of mfwrap beside them."""
    project = ProjectConfiguration(
        project_dir=str(tmp_path), automatic_checkpoint_naming=True, total_limit=2
    )
    stock = AttachedRun(attached=False, project_config=project)
    for _ in range(2):
        stock.accelerator.save_state()
    run = AttachedRun(project_config=project)
    for _ in range(3):
        run.accelerator.save_state()

    names = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert names == [f"checkpoint_{number}" for number in (0, 1, 3, 4)]


def test_saves_into_folders_beside_each_other(tmp_path):
    """A loop saves while another one, with another accelerator, saves into the next folder."""
    first, second = AttachedRun(), AttachedRun(RunSettings(seed=1))
    first.train(0, 1)
    second.train(0, 2)
    saved = [run.state() for run in (first, second)]
    first.accelerator.register_save_state_pre_hook(
        lambda *_: second.accelerator.save_state(tmp_path / "b")
    )

    first.accelerator.save_state(tmp_path / "a")

    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]
    for name, state in zip("ab", saved, strict=True):
        resumed = AttachedRun(RunSettings(seed=2))
        resumed.accelerator.load_state(tmp_path / name)
        assert_same_state(state, resumed.state())


THEIRS = {
    "file": lambda path: path.write_text("mine"),
    "link": lambda path: path.symlink_to("notes.txt"),
    "broken link": lambda path: path.symlink_to("nothing"),
    "folder": lambda path: path.mkdir(),
}
"""What somebody else has put where a checkpoint would be written."""


@pytest.mark.parametrize("kind", THEIRS)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.bin", "mfwrap_step.json", ""])
def test_files_of_somebody_else_are_not_replaced(tmp_path, kind, name):
    """A save into a folder with such a file is refused before it writes, and names the file."""
    folder = tmp_path / "a"
    if name:
        folder.mkdir()
        (folder / "notes.txt").write_text("mine")
    elif kind == "folder":
        pytest.skip("an empty folder is in nobody's way")
    THEIRS[kind](folder / name)
    before = {path: path.lstat() for path in tmp_path.rglob("*")}
    run = AttachedRun()
    run.train(0, 1)

    with pytest.raises(FileExistsError, match=re.escape(name or "a, which mfwrap has not written")):
        run.accelerator.save_state(folder)

    after = {path: path.lstat() for path in tmp_path.rglob("*")}
    assert {path: each.st_mtime_ns for path, each in after.items()} == {
        path: each.st_mtime_ns for path, each in before.items()
    }


def test_what_somebody_else_has_put_into_a_checkpoint(tmp_path):
    """Links, folders and files of other names stay when the checkpoint is saved again."""
    run = AttachedRun()
    run.train(0, 1)
    run.accelerator.save_state(tmp_path / "a")
    (tmp_path / "a" / "empty").mkdir()
    (tmp_path / "a" / "latest").symlink_to("nothing")
    run.train(1, 2)
    run.accelerator.save_state(tmp_path / "a")

    assert (tmp_path / "a" / "empty").is_dir()
    assert (tmp_path / "a" / "latest").is_symlink()
    resumed = AttachedRun(RunSettings(seed=1))
    resumed.accelerator.load_state(tmp_path / "a")
    assert_same_state(run.state(), resumed.state())


def test_the_lock_of_a_save_that_was_killed_at_its_end(tmp_path):
    """The loop that goes on from the checkpoint does not save it again, and removes the lock."""
    run = AttachedRun()
    run.train(0, 1)
    run.accelerator.save_state(tmp_path / "a")
    program = "import os, sys; from pathlib import Path; from mfwrap.checkpoints.locks import *"
    program += "; held = owning(lock_of(Path(sys.argv[1]))); held.__enter__(); os._exit(0)"
    Program(program, tmp_path / "a").end()
    assert lock_of(tmp_path / "a").exists()

    run.accelerator.load_state(tmp_path / "a")

    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize("is_killed", [False, True])
def test_a_hook_that_writes_beside_a_checkpoint(tmp_path, is_killed):
    """What a hook of the user's writes to the parent of its folder is there, as in accelerate."""

    def write(_models, _weights, folder):
        with (Path(folder).parent / "saves.log").open("a") as file:
            file.write("saved\n")
        (Path(folder).parent / "latest.txt").write_text(Path(folder).name)

    run = AttachedRun()
    run.train(0, 1)
    run.accelerator.register_save_state_pre_hook(write)
    run.accelerator.save_state(tmp_path / "a")
    if is_killed:
        interrupted_save(run, tmp_path / "b")
    run.accelerator.save_state(tmp_path / "b")

    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "latest.txt", "saves.log"}
    assert (tmp_path / "latest.txt").read_text() == "b"
    assert (tmp_path / "saves.log").read_text() == (3 if is_killed else 2) * "saved\n"


@pytest.mark.parametrize("names", ["mfwrap_*", "model*", "optimizer*"])
def test_files_that_vanish_between_check_and_load(tmp_path, names):
    """A load does not take files that were deleted meanwhile for files that were never written."""
    run = AttachedRun()
    run.train(0, 1)
    run.accelerator.save_state(tmp_path / "a")
    resumed = AttachedRun(RunSettings(seed=1))

    def delete(*_):
        for path in (tmp_path / "a").glob(names):
            path.unlink()

    resumed.accelerator.register_load_state_pre_hook(delete)
    with pytest.raises(ValueError, match=r"\w+\.\w+ was deleted by another program"):
        resumed.accelerator.load_state(tmp_path / "a")


@pytest.mark.parametrize("saves_again", [False, True])
def test_killed_between_two_renames(tmp_path, saves_again):
    """If the older checkpoint has been set aside, a load or a save puts the new one in place."""
    run = AttachedRun()
    for number, name in enumerate(("old", "new")):
        run.train(number, number + 1)
        run.accelerator.save_state(tmp_path / name)
    saved = run.state()
    staging = staging_folder(tmp_path / "latest")
    (staging / "replaced").mkdir(parents=True)
    shutil.move(tmp_path / "old", staging / "replaced" / "latest")
    shutil.move(tmp_path / "new", staging / "latest")
    if saves_again:
        interrupted_save(run, tmp_path / "latest")

    resumed = AttachedRun(RunSettings(seed=1))
    resumed.accelerator.load_state(tmp_path / "latest")
    assert_same_state(saved, resumed.state())


def test_other_files_of_a_folder(tmp_path):
    """Other files of the folder stay and may change; an interrupted save changes nothing."""
    folder = tmp_path / "state"
    folder.mkdir()
    run = AttachedRun()
    for text in ("first", "second"):
        run.train(0, 1)
        (folder / "notes.txt").write_text(text, encoding="utf-8")
        run.accelerator.save_state(folder)
        saved = run.state()
        assert (folder / "notes.txt").read_text(encoding="utf-8") == text
    run.train(1, 2)
    interrupted_save(run, folder)

    run.accelerator.load_state(folder)
    assert_same_state(saved, run.state())
    assert (folder / "notes.txt").is_file()


@pytest.mark.parametrize("moved", [1, 2, 6])
def test_a_save_that_is_killed_while_it_moves_files(tmp_path, monkeypatch, moved):
    """What it leaves between the other files of a folder is not somebody else's."""
    folder = tmp_path / "state"
    folder.mkdir()
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    run = AttachedRun()
    run.accelerator.register_for_checkpointing(torch.nn.Linear(1, 1))
    run.train(0, 1)
    replace, left = type(folder).replace, iter([True] * moved)

    def move(path, place):
        if place.parent == folder and path.parent != folder and not next(left, False):
            raise InterruptedError
        return replace(path, place)

    with monkeypatch.context() as patch:
        patch.setattr(type(folder), "replace", move)
        with pytest.raises(InterruptedError):
            run.accelerator.save_state(folder)
    assert len(list(folder.iterdir())) == 1 + moved
    shutil.rmtree(staging_folder(folder))  # also by a save that was killed after that

    run.accelerator.save_state(folder)
    assert verify(folder).caveat is None
    assert (folder / "notes.txt").is_file()


@pytest.mark.parametrize("kept", ["mfwrap_records_1.json", "random_states_1.pkl"])
def test_the_checkpoint_of_a_node_with_a_disk_of_its_own(tmp_path, kept):
    """The node has only the files of its ranks, and replaces them in the next save."""
    run = AttachedRun()
    run.accelerator.save_state(tmp_path / "a")
    shutil.copy(tmp_path / "a" / "random_states_0.pkl", tmp_path / "a" / "random_states_1.pkl")
    (tmp_path / "a" / "mfwrap_records_1.json").write_text("{}")
    for path in set((tmp_path / "a").iterdir()) - {tmp_path / "a" / kept}:
        path.unlink()

    run.accelerator.save_state(tmp_path / "a")

    assert verify(tmp_path / "a").caveat is None


def test_a_link_is_written_in_place(tmp_path):
    """A link stays; a save into it that was interrupted is refused."""
    (tmp_path / "elsewhere").mkdir()
    folder = tmp_path / "state"
    folder.symlink_to(tmp_path / "elsewhere")
    run = AttachedRun()
    for _ in range(2):
        run.accelerator.save_state(folder)
        run.accelerator.load_state(folder)
    interrupted_save(run, folder)

    assert folder.is_symlink()
    with pytest.raises(ValueError, match=r"mfwrap_manifest\.json is missing"):
        run.accelerator.load_state(folder)


def test_two_ranks_replace_a_checkpoint(two_ranks, tmp_path):
    """The files of all ranks are in the checkpoint that replaces an older one."""
    first, second = two_ranks.run(save_in_one_folder, str(tmp_path / "latest"))

    assert first == second
    assert {"random_states_0.pkl", "random_states_1.pkl", "mfwrap_manifest.json"} <= set(first)
    assert [path.name for path in tmp_path.iterdir()] == ["latest"]


def test_one_of_two_ranks_deletes(two_ranks, tmp_path):
    """The main process alone deletes, so that no two ranks delete the same files."""
    (remaining, deleted), (_, by_other_rank) = two_ranks.run(save_with_limit, str(tmp_path))

    assert remaining == ["checkpoints/checkpoint_1"]
    assert deleted
    assert by_other_rank == []
