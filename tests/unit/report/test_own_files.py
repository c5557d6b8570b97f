"""Pages and pictures that mfwrap has written are recognized, and no others."""

import errno
import os
from pathlib import Path

import matplotlib as mpl
import pytest
from matplotlib.figure import Figure

from mfwrap.checkpoints.whole import whole_file
from mfwrap.checkpoints.written_files import LIST, begin_list
from mfwrap.report.own_files import is_own_page, is_own_picture
from mfwrap.report.page import write_run_page
from mfwrap.report.picture import draw_run
from support.run_folders import write_lines, write_run

HEAD = '<!doctype html>\n<html lang="en"'


def losses_only(folder):
    """Write a run without norms, whose picture has one panel."""
    write_lines(folder / "metrics.jsonl", [{"step": step, "loss": 1.0} for step in (1, 2)])
    return folder


@pytest.mark.parametrize("write", [write_run, losses_only])
def test_own_files(tmp_path, write):
    """The page and the picture of a run are mfwrap's; neither is the other."""
    run = write(tmp_path / "run")
    write_run_page([run], tmp_path / "page")
    draw_run(run, tmp_path / "picture")

    assert [is_own_page(tmp_path / name) for name in ("page", "picture")] == [True, False]
    assert [is_own_picture(tmp_path / name) for name in ("page", "picture")] == [False, True]


def test_files_of_others(tmp_path):
    """Pages and pictures of other tools, links, folders and broken files are not mfwrap's."""
    (tmp_path / "page").write_text(f"{HEAD}>\n<title>mfwrap</title>", encoding="utf-8")
    with mpl.rc_context():
        Figure().savefig(tmp_path / "picture.png")
        Figure(figsize=(9, 7), dpi=150).savefig(tmp_path / "wide.png")
    (tmp_path / "cut").write_bytes(b"\x89PNG\r\n\x1a\n")
    (tmp_path / "folder").mkdir()
    write_run_page([write_run(tmp_path / "run")], tmp_path / "own")
    (tmp_path / "link").symlink_to("own")
    (tmp_path / "broken").symlink_to("nothing")

    for path in tmp_path.iterdir():
        assert is_own_page(path) == (path.name == "own")
        assert not is_own_picture(path)


def test_a_page_with_ends_of_lines_of_windows(tmp_path):
    """A page is written without them, and recognized with them."""
    page = tmp_path / "page"
    write_run_page([write_run(tmp_path / "run")], page)
    content = page.read_bytes()
    assert b"\r\n" not in content

    page.write_bytes(content.replace(b"\n", b"\r\n"))
    assert is_own_page(page)


@pytest.mark.parametrize("name", ["run.html", "run.png"])
def test_a_run_of_another_user(tmp_path, monkeypatch, name):
    """A page or picture is written where this user must not write the list of files."""
    run = write_run(tmp_path / "run")
    begin_list(run, [])
    open_ = os.open

    def refuse(path, *words):
        if Path(path).name == LIST:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return open_(path, *words)

    monkeypatch.setattr(os, "open", refuse)
    for _ in range(2):
        if name == "run.html":
            write_run_page([run], run / name)
        else:
            draw_run(run, run / name)
    assert is_own_page(run / name) or is_own_picture(run / name)

    with pytest.raises(PermissionError), whole_file(run / "run.json"):
        pass
    assert not (run / "run.json").exists()
