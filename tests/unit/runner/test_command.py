"""`mfwrap data` shows rows, and reports faults like `mfwrap validate`."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from mfwrap.cli import cli, main

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_rows_are_shown():
    """The number of rows follows the option; nothing is written to the run folder."""
    with CliRunner().isolated_filesystem() as folder:
        shown = CliRunner().invoke(cli, ["data", "regression", "--rows", "3"])
        assert not list(Path(folder).iterdir())

    assert shown.exit_code == 0
    assert [line for line in shown.stdout.splitlines() if line.startswith("row")] == [
        "row 1", "row 2", "row 3",
    ]  # fmt: skip


def test_five_rows_by_default():
    """Without the option, five rows are shown."""
    shown = CliRunner().invoke(cli, ["data", "image_classification", "--held-out"])

    assert shown.stdout.count("row ") == 5


def test_a_terminal_does_not_obey_rows(tmp_path):
    """Escapes in a row are shown as text: they would clear the screen or change its title."""
    text = "a \x1b[2J\x1b]0;owned\x07 row"
    (tmp_path / "rows.csv").write_text(f"text,label\n{text},a\nother,b\n", encoding="utf-8")
    given = [f"data.path={tmp_path}/rows.csv", "data.eval_fraction=0"]
    words = ["data", "sequence_classification", *(word for x in given for word in ("--set", x))]
    shown = CliRunner().invoke(cli, words, color=True)

    assert r"\x1b[2J\x1b]0;owned\x07" in shown.stdout
    assert "\x1b" not in shown.output
    assert "\x07" not in shown.output


def test_validate_names_what_is_in_the_way(tmp_path, capsys, monkeypatch):
    """A recipe is not valid in a folder in which the run would replace files of others."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "network.py").write_text("mine")
    words = ["validate", "regression", "--set", "training.output_dir=."]

    with pytest.raises(SystemExit) as left:
        main(words)

    assert left.value.code == 2
    assert "training.output_dir: must be a folder in which" in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob("*")] == ["model", "network.py"]


def test_faults_are_one_sentence(tmp_path, capsys):
    """A null in a file is one line on standard error, for all commands with a recipe."""
    (tmp_path / "rows.csv").write_text('text,label\none,a\n"",b\n')
    said = set()
    for command in ("data", "validate", "train"):
        words = [command, "sequence_classification", "--set", f"data.path={tmp_path}/rows.csv"]
        with pytest.raises(SystemExit) as left:
            main([*words, "--set", f"training.output_dir={tmp_path}/run"])
        assert left.value.code == 2
        said.add(capsys.readouterr().err)

    (line,) = said
    assert line == (
        "mfwrap: sequence_classification:17: data: must have a string in each row of column "
        f"`text`, got an empty value (null) in row 2 (counted from 1), at {tmp_path}/rows.csv:3\n"
    )
