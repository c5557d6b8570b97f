"""Files and saved data sets are read as rows, and the error for a bad line names the line."""

from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict

from mfwrap.recipe import RecipeError
from mfwrap.recipe.run import build_trainer
from support.recipe_data import recipe_of

# Ignore the warnings that TRL and datasets emit.
pytestmark = pytest.mark.filterwarnings("ignore")


def test_text_files(tmp_path, monkeypatch):
    """Each line of a text file is a row; with ``rows_are: files``, each file is a row."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("one\ntwo\nthree\n")
    (tmp_path / "b.txt").write_text("four\n")
    section = {"type": "text", "path": "a.txt", "eval_path": "b.txt"}
    lines = recipe_of("causal_lm", section).data.rows()
    files = recipe_of("causal_lm", section | {"rows_are": "files"}).data.rows()

    assert lines.train["text"][:] == ["one", "two", "three"]
    assert lines.evaluation["text"][:] == ["four"]
    assert files.train["text"][:] == ["one\ntwo\nthree\n"]


@pytest.mark.parametrize(
    ("key", "bad"),
    [
        ("path", b'{"text": "b"'),
        ("path", b"5"),
        ("eval_path", b'{"text": "b"}}'),
    ],
)
def test_a_bad_line_is_named(tmp_path, capfd, key, bad):
    """A line that is not a JSON object is an error, and ``datasets`` logs no second error."""
    files = {name: str(tmp_path / f"{name}.jsonl") for name in ("path", "eval_path")}
    rows = [b'{"text": "a"}', b"", b'{"text": "c"}']
    for name, file in files.items():
        lines = [*rows[:2], bad, rows[2]] if name == key else rows
        Path(file).write_bytes(b"\n".join(lines) + b"\n")
    recipe = recipe_of("causal_lm", {"type": "json_lines", **files})

    says = rf"data\.{key}: must hold one JSON object per line, got '.* at .*/{key}\.jsonl:3$"
    with pytest.raises(RecipeError, match=says):
        build_trainer(recipe)
    assert "JSON" not in capfd.readouterr().err


def test_rows_that_are_not_of_one_form(tmp_path, monkeypatch):
    """Files with different columns are a recipe error that gives the reason of ``datasets``."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text('{"text": "a"}\n')
    Path("other.jsonl").write_text('{"text": "a", "more": 1}\n')
    section = {"type": "json_lines", "path": ["rows.jsonl", "other.jsonl"]}

    with pytest.raises(
        RecipeError, match=r"data\.path: must hold rows with the same columns.*more"
    ):
        build_trainer(recipe_of("causal_lm", section))


def test_datasets_of_a_folder(tmp_path):
    """A saved data set is read by split, and its columns are renamed."""
    parts = {
        name: Dataset.from_dict({"body": [f"{name} {n}" for n in range(4)]})
        for name in ("train", "validation")
    }
    DatasetDict(parts).save_to_disk(tmp_path / "saved")
    section = {
        "type": "datasets",
        "path": str(tmp_path / "saved"),
        "eval_split": "validation",
        "columns": {"text": "body"},
        "max_train_samples": 2,
    }
    rows = recipe_of("causal_lm", section).data.rows()

    assert rows.train["text"][:] == ["train 0", "train 1"]
    assert rows.evaluation["text"][:] == [f"validation {n}" for n in range(4)]
