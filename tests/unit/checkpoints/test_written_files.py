"""The list of a run folder has the names of what mfwrap has written there."""

import os

import pytest

from mfwrap.checkpoints import written_files
from mfwrap.checkpoints.whole import whole_file, whole_folder
from mfwrap.checkpoints.written_files import (
    LIST,
    begin_list,
    list_own,
    listed_names,
    note_written,
    rewrite_list,
)
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


def test_a_list_whose_beginning_is_killed(tmp_path, monkeypatch):
    """In a folder without files of mfwrap, a killed process leaves the list and nothing else."""

    def killed(_descriptor):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", killed)
    with pytest.raises(KeyboardInterrupt):
        begin_list(tmp_path, [])

    assert [path.name for path in tmp_path.iterdir()] == [LIST]
    assert listed_names(tmp_path) == set()


def test_ranks_that_add_names_at_the_same_time(tmp_path, monkeypatch):
    """No name is lost where an append of one machine overwrites that of another, as over NFS."""
    names = ["metrics.jsonl", "metrics_rank1.jsonl", "metrics_rank2.jsonl"]
    read = dict.fromkeys(range(3), listed_names)

    def read_before_the_others_write(folder):
        """Let the next rank add its name after this one has read the list."""
        found = read[rank_now()](folder)
        if rank_now() < 2:
            size = (folder / LIST).stat().st_size
            as_rank(rank_now() + 1)
            list_own(folder / names[rank_now()])
            as_rank(rank_now() - 1)
            os.truncate(folder / LIST, size)  # the end of the file that this machine knows
        return found

    ranks = [0]
    as_rank, rank_now = ranks.append, lambda: ranks[-1]
    monkeypatch.setattr(written_files, "this_rank", rank_now, raising=False)
    rewrite_list(tmp_path, [])
    monkeypatch.setattr(written_files, "listed_names", read_before_the_others_write)
    list_own(tmp_path / names[0])

    assert listed_names(tmp_path) == set(names)
    rewrite_list(tmp_path, ["model"])
    assert listed_names(tmp_path) == {"model"}
    assert [path.name for path in tmp_path.iterdir()] == [LIST]


def test_a_list_that_another_program_has_begun(tmp_path, monkeypatch):
    """On a file system without links, too, it keeps the names that the other one has added."""

    def refuse(path, _):
        rewrite_list(path.parent, ["model"])
        raise PermissionError

    monkeypatch.setattr(type(tmp_path), "hardlink_to", refuse)
    begin_list(tmp_path, ["metrics.jsonl"])

    assert listed_names(tmp_path) == {"model"}
    assert [path.name for path in tmp_path.iterdir()] == [LIST]


@pytest.mark.parametrize(
    "content", [b"a.txt", b"a.txt\r\n", b"\xef\xbb\xbfa.txt\n", b"\xe9\na.txt"]
)
def test_a_list_that_an_editor_has_saved(tmp_path, content):
    """A missing newline, other ends of lines, and bytes that are not UTF-8 change no other name."""
    (tmp_path / LIST).write_bytes(content)
    list_own(tmp_path / "b.txt")

    assert {"a.txt", "b.txt"} <= listed_names(tmp_path)


def test_a_write_that_is_short(tmp_path, monkeypatch):
    """The rest of the name follows."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda opened, text: write(opened, text[:3]))
    rewrite_list(tmp_path, ["a.txt"])
    list_own(tmp_path / "b.txt")

    assert (tmp_path / LIST).read_text() == "a.txt\nb.txt\n"
