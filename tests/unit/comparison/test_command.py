"""`mfwrap compare`: its sentences, its JSON and its exit codes."""

import json

import pytest

from mfwrap.cli import main
from support.run_folders import write_lines, write_run


def call(capsys, *arguments):
    """Return exit code, output and errors of the command."""
    with pytest.raises(SystemExit) as left:
        main(["compare", *map(str, arguments)])
    output = capsys.readouterr()
    return left.value.code, output.out, output.err


@pytest.fixture
def runs(tmp_path):
    """Return the folders of two equal runs, which a test may change."""
    return write_run(tmp_path / "a"), write_run(tmp_path / "b")


def test_exit_codes(runs, tmp_path, capsys):
    """The exit code is 0 for equal runs, 1 for a difference and 2 for a wrong folder."""
    assert call(capsys, *runs)[0] == 0
    records = [{"step": step, "loss": 1.0} for step in (1, 2)]
    write_lines(runs[1] / "metrics.jsonl", records)
    code, out, _ = call(capsys, *runs)
    assert code == 1
    assert "step 1 is the first step that differs. There, the loss differs" in out
    code, out, errors = call(capsys, runs[0], tmp_path / "none")
    assert (code, out) == (2, "")
    assert errors == f"mfwrap: {tmp_path / 'none'} is not a run folder: there is no such folder\n"
    assert call(capsys, *runs, "--tolerance", "-1")[0] == 2
    assert call(capsys, *runs, "--tolerance", "1")[0] == 0


def test_json(runs, capsys):
    """With --json, the output is one JSON object, also for non-finite numbers."""
    write_lines(runs[0] / "metrics.jsonl", [{"step": 1, "loss": "inf"}])
    write_lines(runs[1] / "metrics.jsonl", [{"step": 1, "loss": 2.0}])
    code, out, _ = call(capsys, *runs, "--json")
    found = json.loads(out, parse_constant=pytest.fail)

    assert code == 1
    assert found["is_equal"] is False
    assert found["differences"][0] | {"ranks": []} == {
        "step": 1,
        "kind": "loss",
        "name": "loss",
        "ranks": [],
        "num_differing": 1,
        "num_compared": 1,
        "values": ["inf", 2.0],
        "relative": "inf",
        "rows": [],
        "num_rows": 0,
        "only_in": [[], []],
        "is_other_order": False,
        "at_start": False,
    }
