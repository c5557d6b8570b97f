"""Files are read as rows, and the error for a bad line names the line."""

import csv
import gzip
import json
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from mfwrap.runner import RecipeError
from mfwrap.runner.run import build_trainer, checked_rows, task_keywords
from support.recipe_data import recipe_of
from support.recipe_texts import BERT, PERCEPTRON

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


def test_files_by_source(tmp_path, monkeypatch):
    """A mapping names the sources of the rows, which keep their order and their types."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("features,target\n1,2\n3,4\n")
    (tmp_path / "b1.csv").write_text("features,target\n5,6.5\n")
    (tmp_path / "b2.csv").write_text("features,target\n7,8\n")
    section = {"path": {"web": "a.csv", "books": ["b1.csv", "b2.csv"]}, "eval_fraction": 0}
    section["columns"] = {"features": ["features"]}
    recipe = recipe_of("regression", section, model=PERCEPTRON)
    rows = checked_rows(recipe)
    train, keywords = rows.train, task_keywords(recipe, recipe.model, rows)

    assert train["source"][:] == ["web", "web", "books", "books"]
    assert train["target"][:] == [2, 4, 6.5, 8]
    recipe = recipe_of("regression", section, model=PERCEPTRON)
    keywords = task_keywords(recipe, recipe.model, checked_rows(recipe))
    assert keywords["loss_by"] == ["web", "web", "books", "books"]
    assert keywords["train_dataset"].column_names == ["features", "labels"]


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ({"text": "x", "source": "b"}, {"text": "x", "source": "b"}, "without a column 'source'"),
        ({"text": "x"}, {"text": "x", "more": "b"}, "but a.json lacks 'more', which b.json has"),
        ({"text": "x"}, {"text": 3}, "'text' has the type .* in a.json and .* in b.json"),
    ],
)
def test_files_by_source_that_do_not_fit(tmp_path, monkeypatch, first, second, says):
    """Sources must have the same columns of the same types, and none of them a column `source`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text(json.dumps([first]))
    (tmp_path / "b.json").write_text(json.dumps([second]))
    section = {"path": {"web": "a.json", "books": "b.json"}, "eval_fraction": 0}
    with pytest.raises(RecipeError, match=says):
        checked_rows(recipe_of("causal_lm", section))


@pytest.mark.parametrize("rows_are", ["lines", "files"])
def test_lines_of_any_system(tmp_path, rows_are):
    """Blank lines and a byte order mark are left out; line breaks of any system are the same."""
    file = tmp_path / "a.txt"
    file.write_bytes(b"\xef\xbb\xbfone\r\n\n  \t\ntwo\rthree")
    section = {"type": "text", "path": str(file), "rows_are": rows_are, "eval_fraction": 0}
    found = recipe_of("causal_lm", section).data.rows().train["text"][:]

    lines = ["one", "two", "three"]
    assert found == (lines if rows_are == "lines" else ["one\n\n  \t\ntwo\nthree"])


@pytest.mark.parametrize("rows_are", ["lines", "files"])
def test_a_text_file_that_cannot_be_read(tmp_path, rows_are):
    """A line that is not UTF-8 is named, and so is a damaged archive; an empty file has no row."""
    file = tmp_path / "a.txt"
    section = {"type": "text", "path": str(file), "rows_are": rows_are}
    file.write_bytes(b"one\n\n\xff\n")
    with pytest.raises(RecipeError, match=rf"UTF-8 text, got the byte 0xff at {file}:3; save"):
        build_trainer(recipe_of("causal_lm", section))
    file.with_suffix(".txt.gz").write_bytes(gzip.compress(b"one\ntwo\n")[:-4])
    with pytest.raises(RecipeError, match=rf"must name readable files, got '{file}.gz': "):
        build_trainer(recipe_of("causal_lm", section | {"path": f"{file}.gz"}))
    file.write_bytes(b"")
    if rows_are == "lines":
        with pytest.raises(RecipeError, match="data: must have training rows, got none"):
            build_trainer(recipe_of("causal_lm", section))


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


REVIEWS = [
    {"review": f"text, number {n}", "stars": ["bad", "good"][n % 2], "age": n / 4, "weight": n}
    for n in range(8)
]
COLUMNS = {"text": "review", "label": "stars"}


def write_table(file, rows, delimiter=",", *, header=True):
    """Write rows as a table, with Python's own writer."""
    with Path(file).open("w", encoding="utf-8", newline="") as opened:
        writer = csv.DictWriter(opened, list(rows[0]), delimiter=delimiter)
        if header:
            writer.writeheader()
        writer.writerows(rows)


def written(folder, kind):
    """Write the rows of `REVIEWS` to a file of a kind, and return its name."""
    file = folder / f"rows.{kind}"
    if kind == "csv":
        write_table(file, REVIEWS)
    elif kind == "tsv":
        write_table(file, REVIEWS, "\t")
    elif kind == "parquet":
        parquet.write_table(pa.Table.from_pylist(REVIEWS), file)
    elif kind == "json":
        file.write_text(json.dumps(REVIEWS))
    elif kind == "csv.gz":
        write_table(folder / "plain.csv", REVIEWS)
        file.write_bytes(gzip.compress((folder / "plain.csv").read_bytes()))
    elif kind == "jsonl.gz":
        file.write_bytes(gzip.compress("\n".join(map(json.dumps, REVIEWS)).encode()))
    else:
        file.write_text("\n".join(map(json.dumps, REVIEWS)))
    return str(file)


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "json", "jsonl", "csv.gz", "jsonl.gz"])
def test_the_ending_decides(tmp_path, kind):
    """Without a type, the ending of the file decides how it is read; the rows are the same."""
    section = {"path": written(tmp_path, kind), "columns": COLUMNS, "eval_fraction": 0}
    rows = checked_rows(recipe_of("sequence_classification", section, model=BERT))

    assert rows.train["text"][:] == [row["review"] for row in REVIEWS]
    assert rows.train["label"][:] == [row["stars"] for row in REVIEWS]


def test_a_pattern_means_all_files(tmp_path):
    """A pattern means all files that match it, in the order of their names."""
    write_table(tmp_path / "b.csv", REVIEWS[4:])
    write_table(tmp_path / "a.csv", REVIEWS[:4])
    section = {"path": str(tmp_path / "*.csv"), "columns": COLUMNS, "eval_fraction": 0}
    rows = checked_rows(recipe_of("sequence_classification", section, model=BERT))

    assert rows.train["text"][:] == [row["review"] for row in REVIEWS]


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_the_name_of_a_file_is_no_pattern(tmp_path, kind):
    """A file with brackets in its name is read, not the one that the name would match."""
    file = Path(written(tmp_path, kind)).rename(tmp_path / f"run[1].{kind}")
    (tmp_path / f"run1.{kind}").write_text(file.read_text().replace("text", "another"))
    section = {"path": str(file), "columns": COLUMNS, "eval_fraction": 0}
    rows = checked_rows(recipe_of("sequence_classification", section, model=BERT))

    assert rows.train["text"][:] == [row["review"] for row in REVIEWS]


def test_a_table_without_header(tmp_path):
    """With `column_names` and `delimiter`, a table of any form is read."""
    file = tmp_path / "rows.csv"
    write_table(file, REVIEWS, ";", header=False)
    section = {"path": str(file), "delimiter": ";", "column_names": list(REVIEWS[0])}
    rows = checked_rows(
        recipe_of("sequence_classification", section | {"columns": COLUMNS}, model=BERT)
    )

    assert len(rows.train) + len(rows.evaluation) == len(REVIEWS)


def test_columns_become_a_list(tmp_path):
    """A list of columns makes one column of lists, as a regression needs it."""
    columns = {"features": ["age", "weight"], "target": "weight"}
    section = {"path": written(tmp_path, "csv"), "columns": columns, "eval_fraction": 0}
    rows = checked_rows(recipe_of("regression", section, model=PERCEPTRON))

    assert rows.train["features"][:] == [[row["age"], row["weight"]] for row in REVIEWS]
    assert rows.train["target"][:] == [row["weight"] for row in REVIEWS]


def test_numbers_are_text_where_the_task_needs_text(tmp_path):
    """A column that the task needs as text is read as it is written, leading zeros included."""
    rows = [{"question": f"{n}", "answer": f"00{n}", "label": n} for n in range(4)]
    write_table(tmp_path / "rows.csv", rows)
    keys = {"path": str(tmp_path / "rows.csv"), "eval_fraction": 0}
    tuning = keys | {"columns": {"prompt": "question", "completion": "answer"}}
    found = checked_rows(recipe_of("supervised_tuning", tuning)).train
    classes = keys | {"columns": {"text": "answer"}}
    labels = checked_rows(recipe_of("sequence_classification", classes, model=BERT)).train
    numbers = keys | {"columns": {"text": "answer"}, "text_columns": []}

    assert found["completion"][:] == ["000", "001", "002", "003"]
    assert found["prompt"][:] == ["0", "1", "2", "3"]
    assert labels["label"][:] == [0, 1, 2, 3]
    with pytest.raises(
        RecipeError, match="must have a string in each row of column `answer`, got 0"
    ):
        checked_rows(recipe_of("sequence_classification", numbers | {"type": "csv"}, model=BERT))


def houses(folder, kind, name, rows):
    """Write rows of a table of numbers to a file of a kind, and return its name."""
    file = folder / f"{name}.{kind}"
    if kind == "jsonl":
        file.write_text("\n".join(map(json.dumps, rows)))
    elif kind == "parquet":
        # A column with one text is a column of texts.
        texts = {key for row in rows for key, value in row.items() if isinstance(value, str)}
        as_texts = [{k: str(v) if k in texts else v for k, v in row.items()} for row in rows]
        parquet.write_table(pa.Table.from_pylist(as_texts), file)
    else:
        write_table(file, rows, "\t" if kind == "tsv" else ",")
    return str(file)


HOUSES = [{"area": n + 0.5, "year": 1900 + n, "note": "old", "price": n} for n in range(6)]
PRICES = {"features": ["area", "year"], "target": "price"}


@pytest.mark.parametrize("key", ["path", "eval_path"])
@pytest.mark.parametrize(("column", "value"), [("year", "unknown"), ("area", "1,234.5")])
@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "jsonl"])
def test_text_among_numbers_is_named(tmp_path, kind, column, value, key):
    """A text in a column of numbers is an error that names the text, and the file that has it."""
    bad = [*HOUSES[:4], HOUSES[4] | {column: value}, HOUSES[5]]
    rows = {"path": HOUSES, "eval_path": HOUSES} | {key: bad}
    files = {name: houses(tmp_path, kind, name, table) for name, table in rows.items()}
    section = {**files, "columns": PRICES}

    with pytest.raises(RecipeError) as caught:
        checked_rows(recipe_of("regression", section, model=PERCEPTRON))
    message = str(caught.value)
    assert f"column `{column}`, got {value!r} " in message
    assert "number" in message
    of = " of the held-out rows" if key == "eval_path" else ""
    line = {"csv": 6, "tsv": 6, "jsonl": 5}.get(kind)
    at = f", in {files[key]}" if line is None else f", at {files[key]}:{line}"
    assert message.endswith(f"in row 5 (counted from 1){of}{at}")


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_an_empty_feature_names_its_column(tmp_path, kind):
    """A null in a column of a list of columns is an error that names this column alone."""
    rows = [*HOUSES[:3], HOUSES[3] | {"year": None}]
    section = {"path": houses(tmp_path, kind, "rows", rows), "columns": PRICES}

    wanted = "data: must have a finite number in each row of column `year`"
    says = rf"{wanted}, got an empty value \(null\) in row 4 "
    with pytest.raises(RecipeError, match=says):
        checked_rows(recipe_of("regression", section, model=PERCEPTRON))


@pytest.mark.parametrize("key", ["path", "eval_path"])
@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "jsonl"])
def test_a_missing_column_is_named(tmp_path, kind, key):
    """If the training file or the evaluation file lacks a column, the error names the file."""
    lacking = [{k: v for k, v in row.items() if k != "area"} for row in HOUSES]
    rows = {"path": HOUSES, "eval_path": HOUSES} | {key: lacking}
    files = {name: houses(tmp_path, kind, name, table) for name, table in rows.items()}

    with pytest.raises(RecipeError) as caught:
        checked_rows(recipe_of("regression", {**files, "columns": PRICES}, model=PERCEPTRON))
    assert str(caught.value).endswith(f"got 'area', which is missing in {files[key]}")
    renamed = [{"body": "a"}, {"body": "b"}]
    other = {**files, key: houses(tmp_path, kind, key, renamed)}
    good = "eval_path" if key == "path" else "path"
    other[good] = houses(tmp_path, kind, good, [{"text": "a"}, {"text": "b"}])
    with pytest.raises(RecipeError) as caught:
        checked_rows(recipe_of("causal_lm", other))
    assert f"the columns ['text'], got ['body'] in {files[key]};" in str(caught.value)


@pytest.mark.parametrize("kind", ["csv", "parquet", "jsonl"])
def test_files_of_a_pattern_have_the_same_columns(tmp_path, kind):
    """A file of a pattern that has other columns, or a column of another type, is named."""
    first = houses(tmp_path, kind, "a", HOUSES)
    other = houses(tmp_path, kind, "b", [{"year": 1, "price": 2, "note": "", "more": 1}])
    section = {"path": str(tmp_path / f"*.{kind}"), "columns": PRICES}

    with pytest.raises(RecipeError) as caught:
        checked_rows(recipe_of("regression", section, model=PERCEPTRON))
    assert str(caught.value).endswith(f"but {other} lacks 'area', which {first} has")
    if kind == "parquet":
        houses(tmp_path, kind, "b", [HOUSES[0] | {"year": "x"}])
        with pytest.raises(RecipeError, match=r"'year' has the type Value\('int64'\) in .*a.parq"):
            checked_rows(recipe_of("regression", section, model=PERCEPTRON))


def test_types_follow_from_all_rows(tmp_path):
    """Numbers and texts that begin after many rows are read, also in columns that are not used."""
    rows = [{"text": "" if n < 10_001 else "a", "id": n, "label": n % 2} for n in range(10_003)]
    rows[-1] |= {"id": "last", "label": 0.5}
    write_table(tmp_path / "rows.csv", rows)
    columns = {"features": ["label"], "target": "label"}
    section = {"path": str(tmp_path / "rows.csv"), "eval_fraction": 0, "columns": columns}
    found = checked_rows(recipe_of("regression", section, model=PERCEPTRON)).train

    assert found["target"][:] == [row["label"] for row in rows]
    assert (found["id"][0], found["id"][-1]) == ("0", "last")
    assert (found["text"][0], found["text"][-1]) == (None, "a")


def test_classes_have_one_type_in_both_tables(tmp_path):
    """Classes that look like numbers are texts if the classes of the training table are texts."""
    names = ("path", "eval_path")
    files = {name: str(tmp_path / f"{name}.csv") for name in names}
    section = {**files, "columns": {"text": "a", "label": "c"}}

    def read(train, held_out):
        for name, labels in zip(names, (train, held_out), strict=True):
            write_table(files[name], [{"a": "text", "c": label} for label in labels])
        return checked_rows(recipe_of("sequence_classification", section, model=BERT))

    rows = read(["1", "x", "2"], ["1", "2"])
    assert rows.train["label"][:] == ["1", "x", "2"]
    assert rows.evaluation["label"][:] == ["1", "2"]
    assert read([1, 2, 1], [2, 1]).evaluation["label"][:] == [2, 1]
    says = r"must have a number .* of column `c`, got 'x' in row 3 .*, at .*eval_path.csv:4$"
    with pytest.raises(RecipeError, match=says):
        read([1, 2, 1], [1, 2, "x"])


def test_words_for_null_are_text(tmp_path):
    """``NA`` and ``None`` in a table are text, not null."""
    words = ["NA", "None", "null", "nan"]
    write_table(tmp_path / "rows.csv", [{"text": word, "label": word} for word in words])
    section = {"path": str(tmp_path / "rows.csv"), "eval_fraction": 0}
    rows = checked_rows(recipe_of("sequence_classification", section, model=BERT))

    assert rows.train["text"][:] == words


@pytest.mark.parametrize("kind", ["csv", "tsv", "parquet", "json", "jsonl"])
def test_a_null_is_refused(tmp_path, monkeypatch, kind):
    """A row without a text is an error that names the recipe's line, the row and its place."""
    monkeypatch.setitem(REVIEWS[5], "review", None)
    monkeypatch.setitem(REVIEWS[2], "review", "two\nlines")
    file = written(tmp_path, kind)
    recipe = recipe_of("sequence_classification", {"path": file, "columns": COLUMNS}, model=BERT)
    # A header and a text of two lines precede the row in a table.
    place = {"csv": f", at {file}:8", "tsv": f", at {file}:8", "jsonl": f", at {file}:6"}

    with pytest.raises(RecipeError) as caught:
        checked_rows(recipe)
    assert str(caught.value).endswith(
        "data: must have a string in each row of column `review`, got an empty value (null) in "
        f"row 6 (counted from 1){place.get(kind, f', in {file}')}"
    )
    assert str(caught.value).startswith("r:")


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            "a,b\n1,2\n3,4,5\n",
            "must have 2 fields in each row, as many as columns, got 3 at FILE:3",
        ),
        ("a,b\n1,2,3\n", "must have 2 fields in each row, as many as columns, got 3 at FILE:2"),
        (
            'a,b\n1,"x\ny"\n\n3\n',
            "must have 2 fields in each row, as many as columns, got 1 at FILE:5",
        ),
        ("a,b,a\n1,2,3\n", "must have columns of different names, got 'a' twice at FILE:1"),
        ("a;b\n1;2\n", "set `delimiter` to ';' if that is the delimiter, got the header 'a;b'"),
        ("a,b\n", "must hold a header and rows, got none in FILE"),
        ("", "must hold a header and rows, got none in FILE"),
        ("a,b\n1,\udce9\n", "must hold UTF-8 text, got the byte 0xe9 at FILE:2"),
    ],
)
def test_a_faulty_table_is_named(tmp_path, text, says):
    """A table that would be read wrongly is an error that names the file and the line."""
    file = tmp_path / "rows.csv"
    file.write_bytes(text.encode(errors="surrogateescape"))
    recipe = recipe_of("causal_lm", {"path": str(file)})

    with pytest.raises(RecipeError, match=r"^r:\d+: data\.path: ") as caught:
        checked_rows(recipe)
    assert says.replace("FILE", str(file)) in str(caught.value)


def test_a_long_field(tmp_path):
    """A field longer than the default limit of Python's reader is read whole."""
    texts = ["x" * 200_000, "short"]
    write_table(tmp_path / "rows.csv", [{"text": text} for text in texts])
    rows = recipe_of("causal_lm", {"path": str(tmp_path / "rows.csv"), "eval_fraction": 0})

    assert checked_rows(rows).train["text"][:] == texts


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"data": [{"text": "a"}]}', "if its key 'data' is the list, set `field` to it"),
        ("[]", "must hold a list of objects, got [] in FILE"),
        ("[1]", "must hold a list of objects, got 1 in row 1 of FILE"),
        ('[{"text": "a"}, 5]', "must hold a list of objects, got 5 in row 2 of FILE"),
        ('[{"text": "\\ud83d"}]', "got half of a surrogate pair in {'text': '\\ud83d'} in row 1"),
        ('[{"text":\n "a"},,]', "must hold JSON, got a fault (Expecting value) at FILE:2"),
        ('{"text": "a"}\n{"text": }\n', "must hold one JSON object per line, got "),
    ],
)
def test_a_faulty_json_file_is_named(tmp_path, content, says):
    """A JSON file that is not a list of objects is an error that names the file."""
    file = tmp_path / "rows.json"
    file.write_text(content)

    with pytest.raises(RecipeError, match=r"data\.path: ") as caught:
        checked_rows(recipe_of("causal_lm", {"path": str(file)}))
    assert says.replace("FILE", str(file)) in str(caught.value)


@pytest.mark.parametrize("ending", ["json", "jsonl"])
@pytest.mark.parametrize("brackets", ["[]", ('{"a":', "}")])
@pytest.mark.parametrize("depth", [200, 900])
def test_deep_rows_are_refused(tmp_path, ending, brackets, depth):
    """A row that is nested more deeply than the library can read is an error with its reason."""
    row = '{"text": ' + depth * brackets[0] + "1" + depth * brackets[1] + "}"
    file = tmp_path / f"rows.{ending}"
    file.write_text(f"[{row}]" if ending == "json" else row)

    with pytest.raises(RecipeError, match=rf"data\.path: must .*{file}.*[rR]ecursion"):
        checked_rows(recipe_of("causal_lm", {"path": str(file)}))


@pytest.mark.parametrize("lines", [True, False])
def test_json_of_both_forms(tmp_path, lines):
    """A JSON file may have an object per line, or a list under a key."""
    file = tmp_path / "rows.json"
    texts = [{"text": "a"}, {"text": "b"}]
    file.write_text("\n".join(map(json.dumps, texts)) if lines else json.dumps({"rows": texts}))
    section = {"path": str(file), "eval_fraction": 0} | ({} if lines else {"field": "rows"})

    assert checked_rows(recipe_of("causal_lm", section)).train["text"][:] == ["a", "b"]


@pytest.mark.parametrize(
    ("section", "says"),
    [
        (
            {"type": "csv", "path": "."},
            r"data\.path: must name existing files, got the folder '\.'; name its files",
        ),
        ({"path": "none.csv"}, r"existing files; there is no file 'none\.csv' here"),
        ({"path": "aa.csv"}, r"there is no file 'aa\.csv' here; did you mean 'a\.csv'\?"),
        ({"path": "no*.csv"}, r"existing files; there is no file 'no\*\.csv' here"),
        ({"path": "rows.xlsx"}, r"data\.path: must end in .*, or `type` must be set, got"),
        ({"path": []}, r"data\.type: required"),
        ({"path": ["a.csv", "b.json"]}, r"must name files of one type, got \['csv', 'json'\]"),
        ({"type": "csv", "path": "a.csv", "delimiter": "ab"}, r"data\.delimiter: must be one"),
        ({"type": "csv", "path": "a.csv", "column_names": ["a", "a"]}, r"data\.column_names: "),
    ],
)
def test_settings_out_of_range(tmp_path, monkeypatch, section, says):
    """A path that cannot be read, and a wrong setting, are errors when the recipe is parsed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("text\na\n")
    (tmp_path / "b.json").write_text('[{"text": "a"}]')
    with pytest.raises(RecipeError, match=says):
        recipe_of("causal_lm", section)
