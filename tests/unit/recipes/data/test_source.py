"""Every source of data holds out rows, limits their number, and renames columns."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytest
from datasets import Dataset

from mfwrap.recipes.data.files import TableSource
from mfwrap.recipes.data.source import DataError, DataSource, Needs, Rows, kept_columns


@dataclass(frozen=True, kw_only=True)
class Numbers(DataSource):
    """A source of ten numbered texts."""

    type: Literal["numbers"] = "numbers"

    known_columns = frozenset({"body", "number"})

    def read(self) -> Rows:
        columns = {"body": [f"text {n}" for n in range(10)], "number": list(range(10))}
        return Rows(Dataset.from_dict(columns), None)


def test_rows_are_held_out():
    """A share of the rows is held out, and every row is in exactly one of the two sets."""
    rows = Numbers(eval_fraction=0.3).rows()

    assert (len(rows.train), len(rows.evaluation)) == (7, 3)
    assert sorted([*rows.train["number"], *rows.evaluation["number"]]) == list(range(10))


def test_no_rows_are_held_out():
    """With a share of 0 all rows are for training."""
    rows = Numbers(eval_fraction=0).rows()

    assert (len(rows.train), rows.evaluation) == (10, None)


def test_the_number_of_rows_is_limited():
    """Training rows and held-out rows are each cut to their maximum."""
    rows = Numbers(eval_fraction=0.5, max_train_samples=2, max_eval_samples=1).rows()

    assert (len(rows.train), len(rows.evaluation)) == (2, 1)


def test_columns_are_renamed():
    """A column is renamed to the task's name for it before the rows are checked."""
    seen = []
    needs = Needs(check=lambda table: seen.append(table.column_names))
    rows = Numbers(columns={"text": "body"}).rows(needs)

    assert seen == [["text", "number"]]
    assert set(rows.train.column_names) == {"text", "number"}


def test_a_column_names_the_sources():
    """It may be a column that is renamed; held-out rows of the source's own need none."""
    rows = Numbers(columns={"text": "body"}, loss_by="body", eval_fraction=0).rows()

    assert rows.train["source"][:3] == rows.train["text"][:3] == ["text 0", "text 1", "text 2"]
    assert kept_columns(rows.train, ["text"]) == ["text", "source"]
    with pytest.raises(ValueError, match=r"`loss_by` must be a column of the training rows, \['b"):
        Numbers(loss_by="site")


def test_an_unknown_column_is_an_error():
    """A name that the source does not have is an error at construction."""
    with pytest.raises(ValueError, match=r"`columns` must have values among \['body', 'number'\]"):
        Numbers(columns={"text": "bodi"})


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"eval_fraction": 1.0}, r"`eval_fraction` must be in \[0, 1\), got 1.0"),
        ({"split_seed": -1}, "`split_seed` must be in"),
        ({"max_train_samples": 0}, "`max_train_samples` must be >= 1, got 0"),
        ({"sequence_length": 1}, "`sequence_length` must be >= 2, got 1"),
    ],
)
def test_values_out_of_range(settings, says):
    """A value out of range is an error at construction."""
    with pytest.raises(ValueError, match=says):
        Numbers(**settings)


def test_no_training_rows_are_an_error():
    """A source without rows is an error about the data."""

    @dataclass(frozen=True, kw_only=True)
    class Empty(Numbers):
        def read(self) -> Rows:
            return Rows(Dataset.from_dict({"body": []}), None)

    with pytest.raises(DataError, match="`data` must have training rows, got none"):
        Empty().rows()


def test_numbers_are_checked_before_they_are_joined():
    """The columns of a list of numbers are checked under their own names, and only numbers are."""
    columns = {"features": ["number", "half"], "words": ["body", "body"], "number": "half"}
    seen = []
    uses = {"number": "number", "half": "number"}
    needs = Needs(uses=uses, check_numbers=lambda table: seen.append(table.column_names))

    @dataclass(frozen=True, kw_only=True)
    class Mixed(Numbers):
        known_columns = None

        def read(self) -> Rows:
            return Rows(super().read().train.add_column("half", [n / 2 for n in range(10)]), None)

    rows = Mixed(columns=columns, eval_fraction=0).rows(needs).train
    assert seen == [["number", "half"]]
    assert rows["features"][3] == [3.0, 1.5]
    assert rows["words"][3] == ["text 3", "text 3"]
    assert rows["number"][3] == 1.5
    with pytest.raises(ValueError, match="`columns` must have lists of columns of one type, got b"):
        Numbers(columns={"words": ["body", "number"]}).rows()


@pytest.mark.parametrize(
    "keys", [{}, {"eval_fraction": 0}, {"eval_fraction": 0.5, "max_train_samples": 4}]
)
def test_the_line_of_a_training_row(tmp_path, keys):
    """It is that of the file, whichever rows are held out."""
    files = [tmp_path / name for name in ("a.csv", "b.csv")]
    for number, file in enumerate(files):
        file.write_text("\n".join(["text", *(f"text {number} {line}" for line in range(2, 32))]))
    source = TableSource(type="csv", path=[str(file) for file in files], **keys)
    rows = source.rows().train
    found = [source.source_of_training_row(index, 60) for index in range(len(rows))]

    assert len(rows) > 3
    for place, row in zip(found, rows, strict=True):
        file, _, line = place.rpartition(":")
        assert Path(file).read_text().splitlines()[int(line) - 1] == row["text"]
