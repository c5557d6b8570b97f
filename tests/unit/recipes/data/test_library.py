"""Data sets are loaded by the library `datasets`, from folders, files and splits."""

import csv
import json

import pytest
from datasets import Dataset, DatasetDict

from mfwrap.runner import RecipeError
from mfwrap.runner.run import checked_rows
from support.recipe_data import recipe_of

# Ignore the warnings that datasets emits.
pytestmark = pytest.mark.filterwarnings("ignore")


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


@pytest.fixture
def folder(tmp_path):
    """Return a folder with two files of texts, one per split."""
    for name, number in (("train", 6), ("test", 2)):
        with (tmp_path / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([["text"], *([f"{name} {n}"] for n in range(number))])
    return tmp_path


def test_a_folder_of_files(folder):
    """The files of a folder are its splits, as for a data set on the hub."""
    section = {"path": str(folder), "eval_split": "test"}
    rows = checked_rows(recipe_of("causal_lm", section))

    assert rows.train["text"][:] == [f"train {n}" for n in range(6)]
    assert rows.evaluation["text"][:] == ["test 0", "test 1"]


def test_data_files_and_parts_of_splits(folder):
    """`data_files` names the files of each split, and `split` may be a part of one."""
    files = {"first": str(folder / "train.csv"), "second": [str(folder / "test.csv")]}
    section = {
        "type": "datasets",
        "path": "csv",
        "data_files": files,
        "split": "first[:50%]",
        "eval_split": "second",
    }
    rows = checked_rows(recipe_of("causal_lm", section))

    assert rows.train["text"][:] == ["train 0", "train 1", "train 2"]
    assert rows.evaluation["text"][:] == ["test 0", "test 1"]


def test_a_null_is_refused(folder):
    """A null in the data of the library is an error that names the row."""
    (folder / "rows.jsonl").write_text("\n".join(json.dumps({"text": t}) for t in ["a", None]))
    section = {"type": "datasets", "path": "json", "data_files": str(folder / "rows.jsonl")}

    with pytest.raises(RecipeError, match=r"got an empty value \(null\) in row 2"):
        checked_rows(recipe_of("causal_lm", section))


@pytest.mark.parametrize(
    ("section", "says"),
    [
        ({"path": "pandas", "data_files": "a.pkl"}, "because pickles can run any code"),
        ({"path": "csv"}, "data.path: 'csv' is a builder of datasets and needs"),
        ({"path": "EMPTY"}, r"data\.path: must be a folder with data files or a data set saved"),
        ({"path": "SAVED", "data_files": "a.csv"}, r"data\.data_files: must be left out"),
    ],
)
def test_settings_that_do_not_fit(tmp_path, monkeypatch, section, says):
    """A builder needs files, a folder needs data, and pickles are refused."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "EMPTY").mkdir()
    Dataset.from_dict({"text": ["a"]}).save_to_disk("SAVED")
    with pytest.raises(RecipeError, match=says):
        recipe_of("causal_lm", {"type": "datasets", **section})


def test_the_network_is_a_reason_not_to_read():
    """Files on the network are not read by a check."""
    section = {"type": "datasets", "path": "csv", "data_files": "https://example.org/a.csv"}

    assert recipe_of("causal_lm", section).data.why_unread == "the data are on the network"
    assert recipe_of("causal_lm", {"path": "org/name"}).data.why_unread == "the data are on the hub"


def test_a_split_is_read_by_itself(folder):
    """A file of another split is not read, and the error for a bad file names its key."""
    (folder / "bad.csv").write_text("text\n" + "1\n" * 10_000 + "one\n")
    files = {"train": str(folder / "train.csv"), "bad": str(folder / "bad.csv")}
    section = {"type": "datasets", "path": "csv", "data_files": files}
    rows = checked_rows(recipe_of("causal_lm", section | {"eval_fraction": 0}))

    assert len(rows.train) == 6
    says = r"data\.eval_split: must be a split that can be read, got 'bad': .*one"
    with pytest.raises(RecipeError, match=says):
        checked_rows(recipe_of("causal_lm", section | {"eval_split": "bad"}))
