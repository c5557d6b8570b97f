"""The path of data says of which type they are."""

import PIL.Image
import pytest
from datasets import Dataset

from mfwrap.recipes.data.endings import type_of


@pytest.mark.parametrize(
    ("path", "found"),
    [
        ("rows.csv", "csv"),
        ("rows.TSV", "tsv"),
        ("data.v2/rows.json", "json"),
        ("rows.jsonl.gz", "json_lines"),
        ("rows.ndjson", "json_lines"),
        ("rows.2024.parquet", "parquet"),
        ("notes.txt", "text"),
        ("data/*.csv", "csv"),
        (["a.csv", "b.csv.xz"], "csv"),
        ({"web": "a.csv", "books": ["b.csv", "c.csv"]}, "csv"),
        ("org/name-v1.5", "datasets"),
        ("imdb", "datasets"),
    ],
)
def test_names(path, found):
    """The ending of a file decides; a name without ending is on the hub."""
    assert type_of(path) == found


def test_held_out_rows():
    """They are of the same type; JSON may hold a list in one file and lines in another one."""
    assert type_of("a.csv", "b.csv") == "csv"
    assert type_of("a.jsonl", "b.jsonl") == "json_lines"
    assert type_of("a.jsonl", "b.json") == type_of(["a.json", "b.jsonl"]) == "json"
    says = r"^`eval_path` must name files of the type of `path` \(csv\), got \['json'\]$"
    with pytest.raises(ValueError, match=says):
        type_of("a.csv", "b.json")
    with pytest.raises(ValueError, match=r"^`eval_path` must end in "):
        type_of("a.csv", "b.xlsx")


def test_folders(tmp_path):
    """A folder with images is a folder of images; any other is read by `datasets`."""
    (tmp_path / "photos" / "cat").mkdir(parents=True)
    PIL.Image.new("L", (2, 2)).save(tmp_path / "photos" / "cat" / "1.PNG")
    Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "saved")
    (tmp_path / "files.csv").mkdir()

    assert type_of(str(tmp_path / "photos")) == "image_folder"
    assert type_of(str(tmp_path / "saved")) == "datasets"
    assert type_of(str(tmp_path / "files.csv")) == "datasets"


@pytest.mark.parametrize("path", ["rows.xlsx", "EXISTING", ["a.csv", "b.tsv"]])
def test_unknown_endings(tmp_path, path):
    """Another ending, and files of different types, are errors."""
    (tmp_path / "noending").touch()
    path = str(tmp_path / "noending") if path == "EXISTING" else path
    with pytest.raises(ValueError, match=r"^`path` must "):
        type_of(path)
