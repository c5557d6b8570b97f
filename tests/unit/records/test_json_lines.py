"""A file of records has complete lines only, even if the writing process is killed."""

import contextlib
import json
import math
import re
import resource
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mfwrap.records import json_lines
from mfwrap.records.json_lines import (
    JsonLines,
    last_value,
    parsed_json,
    rank_file,
    rank_files,
    read_json_lines,
)

# Characters that could end a line or a string, and characters of several bytes.
text = st.text(alphabet='az09 "\\\n\r\t\0\x85\u2028\u00e9\U0001f600', max_size=8)
plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | text,
    lambda inner: st.lists(inner) | st.dictionaries(text, inner),
    max_leaves=8,
)


@settings(max_examples=40)
@given(records=st.lists(st.dictionaries(text, plain, max_size=5), max_size=5))
def test_what_is_written_is_read(records):
    """All records are read back in order, even if the file is reopened for each record."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "new" / "records.jsonl"
        for record in records:
            JsonLines(path).append(record)

        assert (read_json_lines(path) if records else []) == records


def test_non_finite_numbers_are_strings(tmp_path):
    """Non-finite numbers are written as strings that ``float`` converts back."""
    path = tmp_path / "records.jsonl"
    JsonLines(path).append({"a": math.nan, "b": [math.inf, {"c": -math.inf}], "d": (1.5,)})

    def refuse(word):
        raise AssertionError(word)

    record = json.loads(path.read_text(), parse_constant=refuse)
    assert record == {"a": "nan", "b": ["inf", {"c": "-inf"}], "d": [1.5]}
    assert float(record["b"][1]["c"]) == -math.inf


@pytest.mark.parametrize("length", range(1, 20))
def test_a_line_that_a_crash_cut_off(length, tmp_path):
    """An incomplete last line is not read, and the next writer removes it."""
    path = tmp_path / "records.jsonl"
    whole, cut = b'{"step": 1}\n', b'{"step": 2, "x": 1}\n'
    path.write_bytes(whole + cut[:length])
    # Only the newline is missing from the longest one, so its record is complete.
    expected = [{"step": 1}] + ([{"step": 2, "x": 1}] if length == len(cut) - 1 else [])

    assert read_json_lines(path) == expected
    JsonLines(path).append({"step": 3})
    assert read_json_lines(path) == [*expected, {"step": 3}]


def test_a_long_line_that_a_crash_cut_off(tmp_path):
    """A cut-off line is removed, however long it is."""
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"step": 1}\n' + b'{"x": "' + b"a" * 200_000)
    JsonLines(path).append({"step": 2})

    assert read_json_lines(path) == [{"step": 1}, {"step": 2}]


@contextlib.contextmanager
def largest_file(num_bytes):
    """Let no file of this process grow beyond a size; a longer write is cut short, then fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("missing", [0, 1, 10])
def test_a_write_that_is_cut_short(missing, tmp_path):
    """If a record does not fit on the disk, nothing of it stays, and a later record is whole."""
    path = tmp_path / "records.jsonl"
    lines = JsonLines(path)
    lines.append({"step": 1})
    line = b'{"step": 2, "x": "aaaaaaaa"}\n'
    with (
        largest_file(path.stat().st_size + len(line) - missing),
        pytest.raises(OSError, match=re.escape(str(path))) if missing else contextlib.nullcontext(),
    ):
        lines.append(json.loads(line))
    assert path.read_bytes() == b'{"step": 1}\n' + (b"" if missing else line)

    lines.append({"step": 3})
    steps = [record["step"] for record in read_json_lines(path)]
    assert steps == ([1, 3] if missing else [1, 2, 3])


@pytest.mark.parametrize(
    "line",
    [
        b"[2]",
        b'{"a": 1} {"b": 2}',
        b'{"a": "\xff"}',
        # A lone surrogate, which `json.loads` accepts in bytes.
        b'{"a": "\xed\xa0\x80"}',
        '{"a": 1}'.encode("utf-16"),
        b'{"a": ' * 100_000 + b"1" + b"}" * 100_000,
    ],
)
def test_an_invalid_line_before_the_last(line, tmp_path):
    """An invalid line before the last line is an error that names file and line."""
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'{"step": 1}\n' + line + b'\n{"step": 3}\n')

    with pytest.raises(
        ValueError, match=re.escape(f"{path}:2: expected a JSON object in UTF-8") + ".*; move the "
    ):
        read_json_lines(path)


def test_blank_lines(tmp_path):
    """Blank lines are skipped, in the middle and at the end."""
    path = tmp_path / "records.jsonl"
    path.write_bytes(b'\n{"step": 1}\n\n \r\n{"step": 2}\n\n\n')

    assert read_json_lines(path) == [{"step": 1}, {"step": 2}]


def test_what_is_no_file(tmp_path):
    """A folder and a broken link with the names of records are skipped."""
    (tmp_path / "a.jsonl").mkdir()
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "nothing")
    (tmp_path / "c_rank2.jsonl").touch()

    assert list(rank_files(tmp_path)) == [(tmp_path / "c_rank2.jsonl", "c", 2)]


def test_a_killed_process_leaves_its_lines(tmp_path):
    """Records that were appended before a SIGKILL are in the file."""
    program = (
        "import os, runpy, signal, sys\n"
        "from pathlib import Path\n"
        # Run the file directly: importing the package would load torch, which takes seconds.
        "lines = runpy.run_path(sys.argv[2])['JsonLines'](Path(sys.argv[1]))\n"
        "for step in range(3):\n"
        "    lines.append({'step': step})\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = tmp_path / "records.jsonl"
    words = [sys.executable, "-c", program, str(path), json_lines.__file__]
    ended = subprocess.run(words, check=False)

    assert ended.returncode == -signal.SIGKILL
    assert read_json_lines(path) == [{"step": 0}, {"step": 1}, {"step": 2}]


def test_each_rank_has_a_file_of_its_own(tmp_path):
    """The main process's file has the plain name; names of other files contain the rank."""
    expected = [("anomalies", 0, "anomalies.jsonl"), ("anomalies", 12, "anomalies_rank12.jsonl")]
    for name, rank, file in expected:
        assert rank_file(tmp_path, name, rank) == tmp_path / file
        (tmp_path / file).touch()

    assert list(rank_files(tmp_path)) == [
        (tmp_path / file, name, rank) for name, rank, file in expected
    ]


def test_an_integer_that_is_no_float():
    """It becomes infinite, so that no reader fails when it makes a float of it."""
    large = "9" * 5000
    assert parsed_json(f"[{10**307}, {large}, -{large}]") == [10**307, math.inf, -math.inf]


def test_the_last_value_of_a_kind(tmp_path):
    """Lines that hold a value of another kind are left out."""
    path = tmp_path / "progress.jsonl"
    path.write_text(
        '{"step": 1, "seconds": 2.5}\n{"step": "2", "seconds": [1]}\n', encoding="utf-8"
    )

    assert (last_value(path, "step", int), last_value(path, "seconds", float)) == (1, 2.5)
    assert (last_value(path, "step"), last_value(path, "tokens")) == ("2", None)
