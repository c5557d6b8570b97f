"""A faulty line of a data file is an error that names file and line."""

import bz2
import csv
import gzip
import json
import lzma
import re

import pytest

from mfwrap.recipes.data.lines import check_json, check_json_lines, read_lines, table_rows


def test_lines_are_counted_from_1(tmp_path):
    """Blank lines are left out and counted; a byte order mark is removed."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"a": 1}\n\n  \r\n{"b": 2}')
    lines = list(read_lines("path", [str(file)]))

    assert [text.strip() for _, text in lines] == ['{"a": 1}', '{"b": 2}']
    assert [place for place, _ in lines] == [f"{file}:1", f"{file}:4"]
    check_json_lines("path", [str(file)])


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (b'{"a": "x', "(Unterminated string starting at)"),
        (b"[1]", "got '[1]'"),
        (b"null", "got 'null'"),
        (b'{"a": 1} {"a": 2}', "(Extra data)"),
        (b'{"\xff": 1}', "must hold UTF-8 text, got the byte 0xff at FILE:3; save the file as"),
        (b'{"a": "\xff"}', "must hold UTF-8 text, got the byte 0xff"),
        (b'{"a": ' + 100_000 * b"[" + 100_000 * b"]" + b"}", "while decoding a JSON array"),
        (b'{"a": "\\ud800"}', "half of a surrogate pair"),
        (b'{"a": ' + 5_000 * b"9" + b"}", "integer string conversion"),
    ],
    ids=range(9),
)
def test_faulty_lines(tmp_path, bad, says):
    """The error is one line that says what is wrong, and where."""
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"a": 1}\n\n' + bad + b"\n")
    with pytest.raises(ValueError, match=r"^`path` must hold ") as error:
        check_json_lines("path", [str(file)])

    assert says.replace("FILE", str(file)) in str(error.value)
    assert f" at {file}:3" in str(error.value)
    assert "\n" not in str(error.value)


def test_files_without_rows(tmp_path):
    """An empty file, and a missing one, are errors that name the file."""
    (tmp_path / "a").write_bytes(b"\n\n")
    with pytest.raises(ValueError, match=r"`path` is empty \(.*/a\); put one JSON object on each"):
        check_json_lines("path", [str(tmp_path / "a")])
    with pytest.raises(ValueError, match=r"`path` must name readable files, got '.*none'"):
        list(read_lines("path", [str(tmp_path / "none")]))


@pytest.mark.parametrize("ending", ["gz", "bz2", "xz"])
def test_compressed_files(tmp_path, ending):
    """A compressed file is read, and a damaged one is an error that names it."""
    compress = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}[ending]
    file = tmp_path / f"a.txt.{ending}"
    content = compress(b"one\ntwo\n" * 100)
    file.write_bytes(content)
    assert len(list(read_lines("path", [str(file)]))) == 200

    for damaged in (content[:-4], b"no archive"):
        file.write_bytes(damaged)
        with pytest.raises(ValueError, match=f"`path` must name readable files, got '{file}': "):
            list(read_lines("path", [str(file)]))


def test_the_limit_of_a_field_is_restored(tmp_path):
    """Reading a table leaves Python's own limit of a field's length as it was."""
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    limit = csv.field_size_limit()
    file = str(tmp_path / "a.csv")
    rows = table_rows("path", file, ",")

    assert list(rows) == [(f"{file}:1", ["a", "b"]), (f"{file}:2", ["1", "2"])]
    assert csv.field_size_limit() == limit


@pytest.mark.parametrize("ending", ["jsonl", "json"])
def test_strings_and_numbers_in_a_column(tmp_path, ending):
    """The library would read the string as JSON, and make 7 of "007"."""
    file = tmp_path / f"a.{ending}"
    rows = [{"a": "007", "b": None}, {"a": None, "b": 2}, {"a": 5, "b": 2.5}]
    file.write_text(json.dumps(rows) if ending == "json" else "\n".join(map(json.dumps, rows)))
    places = [f"at {file}:{n}" if ending == "jsonl" else f"in row {n} of {file}" for n in (1, 3)]
    says = f"'a' is '007' {places[0]}, and 5 {places[1]}: write all of them as strings, or all as "
    with pytest.raises(ValueError, match=re.escape(says)):
        check_json("path", [str(file)], None)
