"""The list of a run folder, or an earlier run's ``run.json``, tells what mfwrap has written."""

import json

import pytest

from mfwrap.checkpoints.manifest import MANIFEST
from mfwrap.checkpoints.written_files import LIST, begin_list, listed_names
from mfwrap.records.own_names import (
    begin_folder,
    check_own,
    is_own,
    known_names,
    own_checkpoints,
    own_names,
)


@pytest.fixture
def folder(tmp_path):
    """Return a folder with files of some names, and a checkpoint with a manifest."""
    for name in ("metrics.jsonl", "notes.txt", "run.png.0123456789abcdef.partial"):
        (tmp_path / name).write_text("{}")
    for step in (2, 10, 4):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-10" / MANIFEST).touch()
    (tmp_path / "checkpoint-best").mkdir()
    return tmp_path


def test_names_that_a_run_writes(folder):
    """Records, checkpoints and temporary files are known; a user's own names are not."""
    assert known_names(folder) == {
        *("metrics.jsonl", "run.png.0123456789abcdef.partial"),
        *(f"checkpoint-{step}" for step in (2, 4, 10)),
    }
    assert known_names(folder / "none") == set()


def test_without_a_list(folder):
    """Nothing is mfwrap's but checkpoints with its files, unless there is its ``run.json``."""
    assert own_names(folder) == {"checkpoint-10"}
    assert [path.name for path in own_checkpoints(folder)] == ["checkpoint-10"]
    for facts in ({"versions": {"torch": "2"}}, {"versions": "mfwrap"}, []):
        (folder / "run.json").write_text(json.dumps(facts))
        assert own_names(folder) == {"checkpoint-10"}

    (folder / "run.json").write_text(json.dumps({"versions": {"mfwrap": "0.1"}}))
    assert own_names(folder) == known_names(folder)
    begin_folder(folder)
    assert listed_names(folder) == known_names(folder)


def test_a_list_in_a_new_folder(tmp_path):
    """The folder is created with its list."""
    begin_folder(tmp_path / "a" / "b")
    assert listed_names(tmp_path / "a" / "b") == set()


def test_with_a_list(folder):
    """Names in it are mfwrap's, also those of checkpoints that were set aside, but no link."""
    begin_list(folder, ["metrics.jsonl", "checkpoint-4", "progress.jsonl", "model"])
    begin_list(folder, ["notes.txt"])  # does not replace the list
    begin_folder(folder)
    (folder / "checkpoint-4").rename(folder / "_abandoned-checkpoint-4.2")
    (folder / "progress.jsonl").symlink_to("metrics.jsonl")
    (folder / "model").symlink_to("checkpoint-2")

    assert own_names(folder) == {"metrics.jsonl", "checkpoint-10", "_abandoned-checkpoint-4.2"}
    assert [path.name for path in own_checkpoints(folder)] == ["checkpoint-10"]
    assert not is_own(folder / "notes.txt")
    assert [path.name for path in folder.glob(f"{LIST}*")] == [LIST]


@pytest.mark.parametrize(
    "name", ["mfwrap_position_1.json", "mfwrap_records_3.json", "mfwrap_step.safetensors"]
)
def test_a_checkpoint_without_a_manifest(folder, name):
    """A file of mfwrap tells whose it is; a link, or a similar name of a user's, does not."""
    for step, file in ((2, name), (4, "mfwrap_notes.json")):
        (folder / f"checkpoint-{step}" / file).touch()
    (folder / "checkpoint-4" / name).symlink_to(folder / "notes.txt")

    assert [path.name for path in own_checkpoints(folder)] == ["checkpoint-2", "checkpoint-10"]
    begin_list(folder, [])
    assert own_names(folder) == {"checkpoint-2", "checkpoint-10"}


def test_all_files_in_the_way_are_named(folder):
    """The error names what is there and not mfwrap's, and nothing else."""
    names = ["z.csv", "metrics.jsonl", "notes.txt", "broken"]
    (folder / "broken").symlink_to("nothing")
    begin_list(folder, ["metrics.jsonl"])

    with pytest.raises(FileExistsError, match=r"has broken, notes\.txt, which mfwrap has not"):
        check_own(folder / name for name in names)
    check_own([folder / "metrics.jsonl", folder / "z.csv"])


def test_a_file_system_without_links(tmp_path, monkeypatch):
    """A list is begun by a rename there."""

    def refuse(*_):
        raise PermissionError

    monkeypatch.setattr(type(tmp_path), "hardlink_to", refuse)
    begin_list(tmp_path, ["a", "b"])

    assert [path.name for path in tmp_path.iterdir()] == [LIST]
    assert listed_names(tmp_path) == {"a", "b"}
