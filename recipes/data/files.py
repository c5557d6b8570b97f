"""Data from local files, and from the `datasets` library."""

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import datasets
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from mfwrap.recipes.data.lines import check_json_lines, read_lines
from mfwrap.recipes.data.places import check_place
from mfwrap.recipes.data.source import DataSource, Rows

Files = str | list[str]

_SAVED = ("dataset_info.json", "dataset_dict.json")
"""A folder written by ``save_to_disk`` has one of these files."""


@dataclass(frozen=True, kw_only=True)
class _FilesSource(DataSource):
    """Base of the sources that read local files."""

    path: Files
    """File or files with training rows."""

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
                    msg = f"`{name}` must name existing files, got {file!r}"
                    raise ValueError(msg)

    def files(self) -> dict[str, Sequence[str]]:
        """Return the files of each key: ``path`` and, if it is set, ``eval_path``."""
        given = {"path": self.path, "eval_path": self.eval_path}
        return {
            name: [files] if isinstance(files, str) else files
            for name, files in given.items()
            if files is not None
        }


@final
@dataclass(frozen=True, kw_only=True)
class JsonLinesSource(_FilesSource):
    """JSON Lines files: one JSON object per line, whose keys are the columns."""

    type: Literal["json_lines"] = "json_lines"

    def read(self) -> Rows:
        files = self.files()
        for name, listed in files.items():
            check_json_lines(name, listed)
        splits = dict(zip(("train", "test"), files.values(), strict=False))
        try:
            with _silent_library():
                found = load_dataset("json", data_files=splits)
        except (DatasetsError, ValueError) as error:
            cause = error.__cause__ or error
            msg = f"`path` must hold rows with the same columns; cannot read {self.path!r}: {cause}"
            raise ValueError(msg) from error
        return Rows(found["train"], found["test"] if self.eval_path else None)

    def place(self, row: int, *, held_out: bool) -> str | None:
        name = "eval_path" if held_out else "path"
        lines = read_lines(name, self.files()[name])
        found = next(itertools.islice(lines, row - 1, None), None)
        return None if found is None else found.place


@final
@dataclass(frozen=True, kw_only=True)
class TextSource(_FilesSource):
    """Text files: one row per line or per file. The column is ``text``."""

    type: Literal["text"] = "text"

    rows_are: Literal["lines", "files"] = "lines"
    """Whether a row is a line or a whole file. Empty lines are left out."""

    known_columns = frozenset({"text"})

    def read(self) -> Rows:
        found = [self._texts(name, files) for name, files in self.files().items()]
        return Rows(found[0], found[1] if self.eval_path else None)

    def _texts(self, name: str, files: Sequence[str]) -> Dataset:
        if self.rows_are == "lines":
            texts = [line.text.rstrip("\r\n") for line in read_lines(name, files)]
        else:
            # `read_lines` first, because its error names the line.
            for _ in read_lines(name, files):
                pass
            texts = [Path(file).read_text(encoding="utf-8-sig") for file in files]
        return Dataset.from_dict({"text": texts})


@final
@dataclass(frozen=True, kw_only=True)
class DatasetsSource(DataSource):
    """A data set of the Hugging Face hub, or a folder written by ``Dataset.save_to_disk``."""

    type: Literal["datasets"] = "datasets"

    path: str
    """Name on the hub, or path of the folder."""

    name: str | None = None
    """Configuration of the data set on the hub."""

    revision: str | None = None
    """Branch, tag or commit on the hub."""

    split: str = "train"
    """Split with training rows."""

    eval_split: str | None = None
    """Split with held-out rows. Without it, `eval_fraction` of the rows is held out."""

    def __post_init__(self) -> None:
        """Check that the path is a saved data set or the form of a name on the hub."""
        super().__post_init__()
        check_place("path", self.path, _SAVED, "a data set saved by `Dataset.save_to_disk`")

    @property
    def why_unread(self) -> str | None:
        return None if Path(self.path).is_dir() else "the data are on the hub"

    def read(self) -> Rows:
        train = self._split(self.split)
        return Rows(train, self._split(self.eval_split) if self.eval_split else None)

    def _split(self, split: str) -> Dataset:
        if self.why_unread is not None:
            return load_dataset(self.path, self.name, split=split, revision=self.revision)
        try:
            found = load_from_disk(self.path)
        except (OSError, ValueError) as error:
            msg = f"`path` must be an undamaged data set, got {self.path!r}: {error}"
            raise ValueError(msg) from error
        if not isinstance(found, DatasetDict):
            return found
        if split not in found:
            msg = f"`split` must be one of {list(found)}, got {split!r}"
            raise ValueError(msg)
        return found[split]


@contextlib.contextmanager
def _silent_library() -> Iterator[None]:
    """Suppress the log of `datasets`; turn its exceptions into one-line recipe errors."""
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)
