"""Files and arguments that list rows of the training data to leave out."""

import pytest

from mfwrap.records.skipped_rows import read_skipped_rows, skipped_rows

LINES = b'{"epoch": 0, "position": 3}\n\n{"position": 0, "epoch": 2, "why": "spike"}\r\n'


@pytest.fixture
def file(tmp_path):
    """Return a file with two rows, one of them with a note, and an empty line."""
    path = tmp_path / "skip.jsonl"
    path.write_bytes(LINES)
    return path


def test_a_file(file):
    """Each line is a row; the order, notes and empty lines do not matter."""
    assert read_skipped_rows(file) == {(0, 3), (2, 0)}
    assert skipped_rows(str(file)) == skipped_rows(file) == read_skipped_rows(file)
    file.write_bytes(b"")
    assert read_skipped_rows(file) == frozenset()


@pytest.mark.parametrize(
    "line",
    [
        b'{"epoch": 0}',
        b'{"epoch": 0, "position": -1}',
        b'{"epoch": 0, "position": 1.0}',
        b'{"epoch": true, "position": 1}',
        b'{"epoch": "0", "position": 1}',
        b"[0, 1]",
        b"0",
        b"null",
        b'{"epoch": 0, "posi',
        b'{"epoch": 0, "position": "\xff"}',
        b"[" * 100_000,
    ],
)
def test_a_wrong_line(file, line):
    """The error names the file, the line and what is expected, in one sentence."""
    file.write_bytes(LINES + line + b"\n")

    with pytest.raises(ValueError, match=r"skip\.jsonl:4: expected an object such as") as error:
        read_skipped_rows(file)
    assert len(str(error.value)) < 200 + len(str(file))


def test_a_missing_file(tmp_path):
    """The error of the operating system names the file."""
    with pytest.raises(FileNotFoundError, match=r"no\.jsonl"):
        skipped_rows(tmp_path / "no.jsonl")


@pytest.mark.parametrize(
    ("rows", "error"),
    [
        (3, TypeError),
        ([3], TypeError),
        ([(0, 1.5)], TypeError),
        ([(0, True)], TypeError),
        ([(0, 1, 2)], ValueError),
        ([(0, -1)], ValueError),
    ],
)
def test_a_wrong_argument(rows, error):
    """Rows are pairs of ints >= 0."""
    assert skipped_rows([(1, 2), [0, 1], (1, 2)]) == {(1, 2), (0, 1)}
    with pytest.raises(error, match="`skip_rows` must"):
        skipped_rows(rows)
