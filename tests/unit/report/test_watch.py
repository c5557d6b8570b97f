"""A page is written again and again until the run has ended."""

import json

import pytest

from mfwrap.report.watch import watch_runs
from support.run_folders import write_lines, write_run


def test_until_the_run_ends(tmp_path):
    """A run without records is waited for; pages are reloaded until the last one."""
    run, page, seen = tmp_path / "run", tmp_path / "page.html", []

    def pause(seconds):
        seen.append((seconds, page.exists() and 'data-watch="5"' in page.read_text()))
        if len(seen) == 1:
            write_run(run)
        if len(seen) == 3:
            (run / "run.json").write_text(json.dumps({"state": "finished"}))

    watch_runs([run], page, 5, pause)

    assert seen == [(5, False), (5, True), (5, True)]
    assert "data-watch" not in page.read_text().split("<head>")[0]


def test_until_the_reader_stops_it(tmp_path):
    """After Ctrl-C the page is written once more, without being reloaded."""
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}])

    def pause(_):
        raise KeyboardInterrupt

    watch_runs([tmp_path], tmp_path / "page.html", 5, pause)

    assert "data-watch" not in (tmp_path / "page.html").read_text().split("<head>")[0]


def test_a_folder_that_is_never_a_run(tmp_path):
    """If there is no record at the end, the error says so, and no page is written."""

    def pause(_):
        raise KeyboardInterrupt

    with pytest.raises(FileNotFoundError, match="is not a run folder"):
        watch_runs([tmp_path], tmp_path / "page.html", 5, pause)
    assert list(tmp_path.iterdir()) == []
