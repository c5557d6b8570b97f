"""Data from local files: tables, JSON, Parquet and text."""

import contextlib
import glob
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import datasets
from datasets import Dataset, Features, Value, concatenate_datasets, load_dataset
from datasets.exceptions import DatasetsError

from mfwrap.recipes.data.fields import ColumnTypes
from mfwrap.recipes.data.lines import (
    check_json,
    check_json_lines,
    checked_table,
    lacking_column,
    read_lines,
    table_rows,
)
from mfwrap.recipes.data.places import is_folder, not_a_file
from mfwrap.recipes.data.source import SOURCE, ColumnUse, DataSource, Rows

Files = str | list[str]

Groups = Files | dict[str, Files]
"""Files, or files by the name of the source that they are."""

_TEXT = Features({"text": Value("string")})


@dataclass(frozen=True, kw_only=True)
class FilesSource(DataSource):
    """Base of the sources that read local files."""

    path: Groups
    """File or files with training rows. A pattern such as ``data/*.csv`` means all files that
    match it, in the order of their names. A mapping such as ``{web: web.csv, books: [a.csv,
    b.csv]}`` names the sources of the rows, which follow one another; see `loss_by`."""

    eval_path: Files | None = None
    """File or files with held-out rows. Without them, `eval_fraction` of the rows is held out."""

    def __post_init__(self) -> None:
        """Check that all files exist."""
        super().__post_init__()
        for name, files in self.files().items():
            if not files:
                msg = f"`{name}` must name at least one file, got {getattr(self, name)!r}"
                raise ValueError(msg)
            for file in files:
                if not Path(file).is_file():
                    msg = f"`{name}` must name existing files{_described(file)}"
                    raise ValueError(msg)

    def files(self) -> dict[str, Sequence[str]]:
        """Return the files of each key: ``path`` and, if it is set, ``eval_path``."""
        given = {"path": self.path, "eval_path": self.eval_path}
        return {name: _matching(files) for name, files in given.items() if files is not None}

    @property
    def source_column(self) -> str | None:
        return SOURCE if self.loss_by is None and isinstance(self.path, dict) else self.loss_by

    def origin(self, *, held_out: bool) -> str | None:
        files = self.files()["eval_path" if held_out and self.eval_path is not None else "path"]
        return files[0] if len(files) == 1 else f"{files[0]} and {len(files) - 1} other files"

    def load(self, builder: str, **options: Any) -> Rows:
        """Read all files with the library `datasets`.

        Args:
            builder: Name of the library's builder, such as ``"parquet"``.
            options: Options of the builder.

        Raises:
            ValueError: If the library cannot read the files. The message has its reason.
        """
        return self._rows(lambda name, files: load_files(name, files, builder, **options))

    def place(self, row: int, *, held_out: bool) -> str | None:
        name = "eval_path" if held_out else "path"
        places = (place for file in self.files()[name] for place in self._places(name, file))
        return next(itertools.islice(places, row - 1, None), None)

    def _places(self, name: str, file: str) -> Iterator[str]:
        """Yield ``file:line`` of each row of a file; nothing if rows are not lines."""
        del name, file
        return iter(())

    def _rows(self, read: Callable[[str, Sequence[str]], Dataset]) -> Rows:
        """Read the files of each key by themselves, so that an error names the key and the file."""
        files = self.files()
        if isinstance(self.path, dict):
            train = self._grouped(self.path, read)
        else:
            train = read("path", files["path"])
        return Rows(train, read("eval_path", files["eval_path"]) if self.eval_path else None)

    def _grouped(
        self, groups: Mapping[str, Files], read: Callable[[str, Sequence[str]], Dataset]
    ) -> Dataset:
        """Read the training files of each source, and add the name of the source as a column."""
        parts: list[Dataset] = []
        for group, files in groups.items():
            matches = _matching(files)
            part = read("path", matches)
            if SOURCE in part.column_names:
                says = f"without a column {SOURCE!r}, whose place the names of the files take"
                msg = f"`path` must be a mapping of files {says}, got one in {matches[0]}"
                raise ValueError(msg)
            first = parts[0].remove_columns(SOURCE).features if parts else part.features
            difference = _difference(self.files()["path"][0], first, matches[0], part.features)
            if difference is not None:
                msg = f"`path` must hold rows with the same columns, but {difference}"
                raise ValueError(msg)
            parts.append(part.add_column(SOURCE, [group] * len(part)))
        return concatenate_datasets(parts)


@final
@dataclass(frozen=True, kw_only=True)
class TableSource(FilesSource):
    """Tables: a header with the names of the columns, and one row per line.

    An empty field is null. Other words for null, such as ``NA`` and ``None``, are text.
    """

    type: Literal["csv", "tsv"]

    text_columns: list[str] | None = None
    """Columns whose values are texts even if they look like numbers, such as ``007``. By default
    those that the task needs as texts."""

    delimiter: str | None = None
    """Character between two fields; by default a comma for ``csv`` and a tab for ``tsv``."""

    column_names: list[str] | None = None
    """Names of the columns, for files without a header."""

    def __post_init__(self) -> None:
        """Check that the delimiter is one character."""
        super().__post_init__()
        if self.delimiter is not None and (len(self.delimiter) != 1 or self.delimiter in '"\r\n'):
            msg = f"`delimiter` must be one character, for example ';', got {self.delimiter!r}"
            raise ValueError(msg)
        names = self.column_names
        if names is not None and (not names or len(set(names)) < len(names)):
            msg = f"`column_names` must have different names, got {names!r:.80}"
            raise ValueError(msg)

    def read(self) -> Rows:
        return self.read_as({})

    def read_as(self, uses: Mapping[str, ColumnUse]) -> Rows:
        texts = {name for name, use in uses.items() if use == "text"}
        if self.text_columns is not None:
            texts = set(self.text_columns)
        types = {"path": _column_types(self, "path", texts)}
        # A class that is text in the training table is so in the other one: "1" and 1 differ.
        texts |= {name for name in types["path"].texts if uses.get(name) == "class"}
        if self.eval_path is not None:
            types["eval_path"] = _column_types(self, "eval_path", texts)
        return self._rows(lambda name, files: _read_table(self, name, files, types[name]))

    def _places(self, name: str, file: str) -> Iterator[str]:
        first = 0 if self.column_names is not None else 1  # after the header of each file
        rows = table_rows(name, file, self.separator)
        return (place for place, _ in itertools.islice(rows, first, None))

    @property
    def separator(self) -> str:
        """Character between two fields."""
        return self.delimiter or ("\t" if self.type == "tsv" else ",")


def _column_types(source: TableSource, name: str, texts: Collection[str]) -> ColumnTypes:
    """Return the types of the columns of a table's files, and check the files."""
    types = ColumnTypes(texts)
    files = source.files()[name]
    for names, fields in checked_table(name, files, source.separator, source.column_names):
        types.add(names, fields)
    return types


def _read_table(
    source: TableSource, name: str, files: Sequence[str], types: ColumnTypes
) -> Dataset:
    names = source.column_names
    if names is None:
        _, names = next(table_rows(name, files[0], source.separator))
    return load_files(
        name,
        files,
        "csv",
        sep=source.separator,
        column_names=source.column_names,
        features=types.features(names),
        keep_default_na=False,
        na_values=[""],
    )


@final
@dataclass(frozen=True, kw_only=True)
class ParquetSource(FilesSource):
    """Parquet files."""

    type: Literal["parquet"] = "parquet"

    def read(self) -> Rows:
        return self.load("parquet")


@final
@dataclass(frozen=True, kw_only=True)
class JsonSource(FilesSource):
    """JSON files: a list of objects, whose keys are the columns, or one object per line."""

    type: Literal["json"] = "json"

    field: str | None = None
    """Key of the list, if each file is an object that holds the list."""

    def read(self) -> Rows:
        return self.read_as({})

    def read_as(self, uses: Mapping[str, ColumnUse]) -> Rows:
        for name, files in self.files().items():
            check_json(name, files, self.field, uses)
        return self.load("json", field=self.field)


@final
@dataclass(frozen=True, kw_only=True)
class JsonLinesSource(FilesSource):
    """JSON Lines files: one JSON object per line, whose keys are the columns."""

    type: Literal["json_lines"] = "json_lines"

    def read(self) -> Rows:
        return self.read_as({})

    def read_as(self, uses: Mapping[str, ColumnUse]) -> Rows:
        for name, files in self.files().items():
            check_json_lines(name, files, uses)
        return self.load("json")

    def _places(self, name: str, file: str) -> Iterator[str]:
        return (place for place, _ in read_lines(name, [file]))


@final
@dataclass(frozen=True, kw_only=True)
class TextSource(FilesSource):
    """Text files: one row per line or per file. The column is ``text``."""

    type: Literal["text"] = "text"

    rows_are: Literal["lines", "files"] = "lines"
    """Whether a row is a line or a whole file. Empty lines are left out."""

    known_columns = frozenset({"text"})

    def read(self) -> Rows:
        return self._rows(self._texts)

    def _texts(self, name: str, files: Sequence[str]) -> Dataset:
        kind = {"lines": "line", "files": "document"}[self.rows_are]
        options = {"features": _TEXT, "encoding": "utf-8-sig", "sample_by": kind}
        try:
            rows = load_files(name, files, "text", **options)
        except ValueError:
            # A line that is not UTF-8 raises an error that names it. Files without lines are empty.
            if sum(1 for _ in read_lines(name, files)):
                raise
            return Dataset.from_dict({"text": []}, _TEXT)
        if self.rows_are == "files":
            return rows
        return rows.filter(lambda text: bool(text.strip()), input_columns="text")


def load_files(name: str, files: Sequence[str], builder: str, **options: Any) -> Dataset:
    """Read files of one key with the library `datasets`.

    Args:
        name: Key that names the files, for error messages.
        files: Paths of the files.
        builder: Name of the library's builder, such as ``"csv"``.
        options: Options of the builder.

    Raises:
        ValueError: If the library cannot read the files. The message names the file, and the column
            in which it differs from the first file.
    """
    try:
        with reading_locally():
            # The library takes each name for a pattern.
            names = [glob.escape(file) if Path(file).exists() else file for file in files]
            return load_dataset(builder, data_files=names, split="train", **options)
    except (DatasetsError, RecursionError, ValueError) as error:
        cause = error.__cause__ or error
    first: Dataset | None = None
    for file in files if len(files) > 1 else ():
        found = load_files(name, [file], builder, **options)
        first = found if first is None else first
        difference = _difference(files[0], first.features, file, found.features)
        if difference is not None:
            msg = f"`{name}` must hold rows with the same columns, but {difference}"
            raise ValueError(msg) from cause
    msg = f"`{name}` must hold rows with the same columns; cannot read {', '.join(files)}: {cause}"
    raise ValueError(msg) from cause


def _difference(first: str, features: Features, file: str, others: Features) -> str | None:
    """Return in which column a file differs from the first file; ``None`` if in none."""
    lacking = lacking_column(first, features, file, others)
    if lacking is not None:
        return lacking
    for name, feature in features.items():
        if feature != others[name]:
            return f"{name!r:.60} has the type {feature} in {first} and {others[name]} in {file}"
    return None


@contextlib.contextmanager
def reading_locally() -> Iterator[None]:
    """Suppress the log of `datasets`, and its request to a server that counts what is loaded.

    The library sends the request for local files, too. Without a network it may wait for seconds.
    """
    level, counts = datasets.logging.get_verbosity(), datasets.config.HF_UPDATE_DOWNLOAD_COUNTS
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
        datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = counts


def listed(files: Groups) -> Sequence[str]:
    """Return one file, a list of files, or the files of all sources, as a list."""
    if isinstance(files, dict):
        return [one for group in files.values() for one in listed(group)]
    return [files] if isinstance(files, str) else files


def _described(file: str) -> str:
    """Return the end of an error about a path that is no file, with what to write instead."""
    if is_folder(file):
        return f", got the folder {file!r}; name its files: '{file}/*'"
    return f"; {not_a_file(file)}"


def _matching(files: Groups) -> Sequence[str]:
    """Return the files that names and patterns mean."""
    return [one for file in listed(files) for one in _matches(file)]


def _matches(file: str) -> Sequence[str]:
    """Return the files that match a pattern; without a match, or for another name, the name."""
    if not glob.has_magic(file) or Path(file).exists():
        return [file]
    # `Path.glob` refuses absolute patterns.
    return sorted(glob.glob(file, recursive=True)) or [file]  # noqa: PTH207  (see above)
