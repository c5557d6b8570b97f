"""`mfwrap port`: its lines, its JSON and its exit codes."""

import json
import subprocess
import sys

import pytest

from mfwrap.cli import main


def call(capsys, *arguments):
    """Return exit code, output and errors of the command."""
    with pytest.raises(SystemExit) as left:
        main(["port", *map(str, arguments)])
    output = capsys.readouterr()
    return left.value.code, output.out, output.err


@pytest.fixture
def script(tmp_path):
    """Return a script whose names all have counterparts."""
    file = tmp_path / "train.py"
    file.write_text("from mindspore import nn\nnn.Dense(1, 2), nn.TrainOneStepCell\n")
    return file


def test_a_script_whose_names_are_known(script, capsys):
    """The output has a line for each name and a summary; the exit code is 0."""
    code, out, err = call(capsys, script)

    assert (code, err) == (0, "")
    first, *others = out.splitlines()
    assert first.startswith(f"{script}:1: mindspore.nn: write `torch.nn`; ")
    assert others == [
        f"{script}:2: nn.Dense: write `torch.nn.Linear`",
        f"{script}:2: nn.TrainOneStepCell: the same: `mfwrap.TrainOneStepCell`",
        "3 names: 1 the same, 2 to write otherwise",
    ]


@pytest.mark.parametrize("name", ["Lamb", "NoSuchName"])
def test_a_name_without_a_counterpart(script, capsys, name):
    """The exit code is 1 if a name is unknown or has no counterpart."""
    script.write_text(f"from mindspore.nn import {name}\n")

    assert call(capsys, script)[0] == 1


def test_json(script, capsys):
    """With --json, each line is an object."""
    code, out, _ = call(capsys, script, "--json")
    records = [json.loads(line) for line in out.splitlines()]

    assert code == 0
    assert records[1] == {
        "file": str(script),
        "lines": [2],
        "name": "nn.Dense",
        "verdict": "write",
        "text": "write `torch.nn.Linear`",
    }


def test_a_script_of_another_library(script, capsys):
    """A script without MindSpore has no lines but the summary."""
    script.write_text("import torch\n")

    assert call(capsys, script) == (0, "no names of MindSpore or MindFormers found\n", "")


def test_what_cannot_be_read(script, capsys):
    """A folder, a file that does not exist and a syntax error are one sentence each, and 2."""
    (script.parent / "wrong.py").write_text("def f(:\n")
    for given in (script.parent, script.parent / "none.py", script.parent / "wrong.py"):
        code, out, err = call(capsys, script, given)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert err.startswith(f"mfwrap: {given}")
    assert call(capsys)[0] == 2


def test_the_command_needs_no_torch(script):
    """The command reads a script in a fraction of the time that torch takes to load."""
    code = (
        "import sys\nfrom mfwrap.cli import main\ntry:\n    main(['port', sys.argv[1]])\n"
        "except SystemExit:\n    print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(script)], capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines()[-1] == "False"
