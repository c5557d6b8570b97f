"""A CSV file has one row for each step, whatever names come later and wherever a crash cut it."""

import csv
import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.callbacks.loop.csv_file import CsvFile
from support.programs import Program

NUMBERS = st.one_of(st.floats(), st.integers(-(2**53), 2**53), st.booleans())
NAMES = st.sampled_from(["a", 'b,"', "c/d", "e\u2028f", "g\rh", "i\nj", "k\x85"])
ROWS = st.lists(st.dictionaries(NAMES, NUMBERS), max_size=6)


def read(path):
    """Return the rows of a file; empty cells are left out."""
    with path.open(encoding="utf-8", newline="") as file:
        return [{k: float(v) for k, v in row.items() if v} for row in csv.DictReader(file)]


def same(found, expected):
    """Return whether two lists of rows have the same numbers, NaN included."""
    texts = [
        [{k: repr(float(v)) for k, v in row.items()} for row in one] for one in (found, expected)
    ]
    return texts[0] == texts[1]


@given(rows=ROWS)
def test_all_numbers_are_read_back(rows, tmp_path_factory):
    """Any numbers under any names come back as they were."""
    path = tmp_path_factory.mktemp("csv") / "metrics.csv"
    file = CsvFile(path, 0)
    for step, row in enumerate(rows, 1):
        file.append(step, row)

    expected = [{"step": step, **row} for step, row in enumerate(rows, 1)]
    assert same(read(path) if rows else [], expected)


@given(rows=ROWS)
def test_a_resumed_run_keeps_all_rows(rows, tmp_path_factory):
    """Rows of earlier steps stay, whatever characters their names have."""
    path = tmp_path_factory.mktemp("csv") / "metrics.csv"
    file = CsvFile(path, 0)
    for step, row in enumerate(rows, 1):
        file.append(step, row)
    CsvFile(path, len(rows) + 1).append(len(rows) + 1, {"a": 1.0})

    expected = [{"step": step, **row} for step, row in enumerate([*rows, {"a": 1.0}], 1)]
    assert same(read(path), expected)


@pytest.mark.skipif(sys.platform == "win32", reason="limits of files are those of POSIX")
def test_a_row_that_does_not_fit_leaves_nothing(tmp_path):
    """On a full disk, for which a limit on the file's size stands, no half row is left."""
    path = tmp_path / "metrics.csv"
    program = f"""
import pathlib, resource, signal
from mfwrap.callbacks.loop.csv_file import CsvFile
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = pathlib.Path({str(path)!r})
file = CsvFile(path, 0)
file.append(1, {{"loss": 1 / 3}})
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 5, hard))
try:
    file.append(2, {{"loss": 2 / 3}})
except OSError:
    print("full")
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
file.append(3, {{"loss": 1.0}})
"""

    assert Program(program).end() == "full\n"
    assert read(path) == [{"step": 1, "loss": 1 / 3}, {"step": 3, "loss": 1.0}]


@pytest.mark.parametrize("cut", range(1, 12))
def test_a_cut_row_and_later_rows_are_removed(cut, tmp_path):
    """A resumed run keeps whole rows up to its step, and adds its own."""
    path = tmp_path / "metrics.csv"
    file = CsvFile(path, 0)
    for step in range(1, 6):
        file.append(step, {"loss": step / 2})
    path.write_bytes(path.read_bytes()[:-cut])

    resumed = CsvFile(path, 3)
    resumed.append(4, {"loss": math.inf, "norm": 1})

    expected = [{"step": n, "loss": n / 2} for n in (1, 2, 3)]
    assert same(read(path), [*expected, {"step": 4, "loss": math.inf, "norm": 1}])


def test_a_run_from_the_start_renames_an_earlier_file(tmp_path):
    """Rows of earlier runs in the same folder are kept under other names, with a warning."""
    path = tmp_path / "metrics.csv"
    CsvFile(path, 0).append(1, {"loss": 1.0})
    for number in (1, 2):
        with pytest.warns(UserWarning, match=rf"names of its files now end in \.{number}$"):
            CsvFile(path, 0).append(1, {"loss": 1.0 + number})

    files = [path, tmp_path / "metrics.csv.1", tmp_path / "metrics.csv.2"]
    assert [read(file)[0]["loss"] for file in files] == [3.0, 1.0, 2.0]


def test_a_resume_without_a_whole_row_begins_an_empty_file(tmp_path):
    """A file that has no row up to the step of the checkpoint is begun anew."""
    path = tmp_path / "metrics.csv"
    CsvFile(path, 0).append(5, {"loss": 1.0})

    CsvFile(path, 4).append(5, {"norm": 2.0})

    assert read(path) == [{"step": 5, "norm": 2.0}]


def test_a_file_with_a_byte_order_mark(tmp_path):
    """A spreadsheet may have saved the file with one; its rows are kept."""
    path = tmp_path / "metrics.csv"
    CsvFile(path, 0).append(1, {"loss": 1.0})
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())

    CsvFile(path, 1).append(2, {"loss": 2.0})

    assert read(path) == [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]


@pytest.mark.parametrize("when", ["before", "during"])
def test_a_file_in_another_form(tmp_path, when):
    """What a spreadsheet has saved with semicolons is kept under another name."""
    path = tmp_path / "metrics.csv"
    file = CsvFile(path, 0)
    file.append(1, {"loss": 1.0})
    text = path.read_text().replace(",", ";")
    path.write_text(text)

    with pytest.warns(UserWarning, match=r"names of its files now end in \.1$"):
        (CsvFile(path, 1) if when == "before" else file).append(2, {"loss": 2.0, "norm": 1.0})

    assert (tmp_path / "metrics.csv.1").read_text() == text
    assert read(path) == [{"step": 2, "loss": 2.0, "norm": 1.0}]
