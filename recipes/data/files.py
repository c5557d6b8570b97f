"""Rows from files, and from the `datasets` library."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, final

import datasets
from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from mfwrap.recipes.data.source import DataSource, Rows

__all__ = ["DatasetsSource", "JsonLinesSource", "TextSource"]

Files = str | list[str]


@dataclass(frozen=True, kw_only=True)
class _FilesSource(DataSource):
    """What sources of local files have."""

    path: Files
    """File or files to train with."""

    eval_path: Files | None = None
    """File or files that are held out; without them, `eval_fraction` of the rows."""

    def __post_init__(self) -> None:
        """Refuse files that are not there."""
        super().__post_init__()
        for name in ("path", "eval_path"):
            for file in _listed(getattr(self, name)):
                if not Path(file).is_file():
                    msg = f"`{name}` must name files that are there, got {file!r}"
                    raise ValueError(msg)


@final
@dataclass(frozen=True, kw_only=True)
class JsonLinesSource(_FilesSource):
    """Files with one JSON object a line; its keys are the columns."""

    type: Literal["json_lines"] = "json_lines"

    def __post_init__(self) -> None:
        """Refuse files that are not there, or whose first line is no JSON object."""
        super().__post_init__()
        for file in _listed(self.path):
            with Path(file).open("rb") as lines:
                first = next(lines, b"")
            if not _is_object(first):
                msg = f"`path` must hold one JSON object a line, got {file!r} with another first"
                raise ValueError(msg)

    def read(self) -> Rows:
        files = {"train": list(_listed(self.path)), "test": list(_listed(self.eval_path))}
        try:
            with _silent_library():
                found = load_dataset("json", data_files={k: v for k, v in files.items() if v})
        except DatasetsError as error:
            self._name_bad_line()
            cause = error.__cause__ or error
            msg = (
                f"`path` must hold rows of one form, got {self.path!r}, which is not read: {cause}"
            )
            raise ValueError(msg) from error
        return Rows(found["train"], found["test"] if self.eval_path else None)

    def _name_bad_line(self) -> None:
        """Raise `ValueError` at the first line that is no JSON object; the library names none."""
        for name in ("path", "eval_path"):
            for file in _listed(getattr(self, name)):
                with Path(file).open("rb") as lines:
                    for number, line in enumerate(lines, start=1):
                        if line.strip() and not _is_object(line):
                            got = f"line {number} of {file!r}: {line.strip()[:60]!r}"
                            msg = f"`{name}` must hold one JSON object a line, got {got}"
                            raise ValueError(msg)


@final
@dataclass(frozen=True, kw_only=True)
class TextSource(_FilesSource):
    """Text files: one row for each line, or for the whole file; the column is ``text``."""

    type: Literal["text"] = "text"

    rows_are: Literal["lines", "files"] = "lines"
    """What a row is. Empty lines are left out."""

    known_columns = frozenset({"text"})

    def read(self) -> Rows:
        return Rows(self._texts(self.path), self._texts(self.eval_path) if self.eval_path else None)

    def _texts(self, files: Files) -> Dataset:
        texts = [Path(file).read_text(encoding="utf-8") for file in _listed(files)]
        if self.rows_are == "lines":
            texts = [line for text in texts for line in text.splitlines() if line.strip()]
        return Dataset.from_dict({"text": texts})


@final
@dataclass(frozen=True, kw_only=True)
class DatasetsSource(DataSource):
    """A data set of the Hugging Face hub, or a folder that ``Dataset.save_to_disk`` wrote."""

    type: Literal["datasets"] = "datasets"

    path: str
    """Name on the hub, or folder."""

    name: str | None = None
    """Configuration of a data set of the hub."""

    revision: str | None = None
    """Branch, tag or commit on the hub."""

    split: str = "train"
    """Split to train with."""

    eval_split: str | None = None
    """Split that is held out; without it, `eval_fraction` of the rows."""

    def read(self) -> Rows:
        train = self._split(self.split)
        return Rows(train, self._split(self.eval_split) if self.eval_split else None)

    def _split(self, split: str) -> Dataset:
        if (
            not (Path(self.path) / "dataset_dict.json").exists()
            and not (Path(self.path) / "dataset_info.json").exists()
        ):
            return load_dataset(self.path, self.name, split=split, revision=self.revision)
        found = load_from_disk(self.path)
        if not isinstance(found, DatasetDict):
            return found
        if split not in found:
            msg = f"`split` must be one of {list(found)}, got {split!r}"
            raise ValueError(msg)
        return found[split]


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


@contextlib.contextmanager
def _silent_library() -> Iterator[None]:
    """Let `datasets` log nothing: what it raises is told in one line."""
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)


def _listed(files: Files | None) -> Sequence[str]:
    return [] if files is None else [files] if isinstance(files, str) else files
