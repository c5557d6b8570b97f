"""The list of a run folder has the names of what mfwrap has written there."""

import pytest

from mfwrap.checkpoints.folders import whole_file, whole_folder
from mfwrap.checkpoints.written_files import LIST, listed_names, note_written, rewrite_list
from mfwrap.records.run_files import open_records


def test_without_a_list(tmp_path):
    """A folder without a list gets none."""
    note_written(tmp_path / "a.txt")

    assert listed_names(tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_each_name_is_listed_once(tmp_path):
    """Files, folders and records are listed; those in subfolders have no list."""
    rewrite_list(tmp_path, [])
    for _ in range(2):
        with whole_file(tmp_path / "b.json") as partial:
            partial.write_text("{}")
        with whole_folder(tmp_path / "model") as written:
            (written / "weights").touch()
        open_records(tmp_path / "c.jsonl", 0)

    assert (tmp_path / LIST).read_text() == "b.json\nmodel\nc.jsonl\n"
    rewrite_list(tmp_path, ["model"])
    assert listed_names(tmp_path) == {"model"}


def test_listed_before_it_is_there(tmp_path, monkeypatch):
    """A file that gets its name when the process is killed is in the list."""
    rewrite_list(tmp_path, [])
    replace = type(tmp_path).replace

    def killed(path, target):
        replace(path, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(tmp_path), "replace", killed)
    with pytest.raises(KeyboardInterrupt), whole_file(tmp_path / "b.json"):
        pass

    assert listed_names(tmp_path) == {"b.json"}
