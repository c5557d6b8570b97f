"""The command that writes the page of runs."""

from pathlib import Path

import pytest

from support.run_folders import write_run
from unit.test_cli import call


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Return two folders of runs in the present folder."""
    monkeypatch.chdir(tmp_path)
    return [write_run(Path("first")), write_run(Path("second"))]


def test_one_run(runs, capsys):
    """Its page lies in its folder, and writing it anew shows nothing of the old one."""
    for _ in range(2):
        assert call(capsys, "report", runs[0]) == (0, "wrote first/run.html\n", "")
    page = (runs[0] / "run.html").read_text(encoding="utf-8")

    assert "<h1>first</h1>" in page
    assert sorted(path.name for path in Path().iterdir()) == ["first", "second"]


def test_several_runs(runs, capsys):
    """Their page lies here, or where it is asked for."""
    assert call(capsys, "report", *runs)[:2] == (0, "wrote run.html\n")
    assert call(capsys, "report", *runs, "--output", "new/both.html")[:2] == (
        0,
        "wrote new/both.html\n",
    )
    assert "first, second</h1>" in Path("new/both.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none"], "mfwrap: `run` must be the folder of a run, got none, which is none\n"),
        (["."], "with neither *.jsonl nor trainer_state.json that holds numbers of steps\n"),
        ([], "Missing argument 'RUN...'.; see mfwrap --help\n"),
        (["first", "--output", "second"], "File 'second' is a directory.; see mfwrap --help\n"),
        (["first", "--output", "first/metrics.jsonl/page.html"], "must be a file that can be"),
    ],
)
def test_no_run(arguments, message, runs, capsys):
    """What is no run, and a page that cannot be written, end with 2 and one line."""
    code, out, err = call(capsys, "report", *arguments)

    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
