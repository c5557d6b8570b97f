"""Data from local files, and from the `datasets` library."""

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

Files = str | list[str]


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
        for name in ("path", "eval_path"):
            for file in _listed(getattr(self, name)):
                if not Path(file).is_file():
                    msg = f"`{name}` must name existing files, got {file!r}"
                    raise ValueError(msg)


@final
@dataclass(frozen=True, kw_only=True)
class JsonLinesSource(_FilesSource):
    """JSON Lines files: one JSON object per line, whose keys are the columns."""

    type: Literal["json_lines"] = "json_lines"

    def __post_init__(self) -> None:
        """Check that all files exist and begin with a JSON object."""
        super().__post_init__()
        for file in _listed(self.path):
            with Path(file).open("rb") as lines:
                first = next(lines, b"")
            if not _is_object(first):
                msg = (
                    f"`path` must hold one JSON object per line, got {first[:60]!r} as the first "
                    f"line of {file!r}"
                )
                raise ValueError(msg)

    def read(self) -> Rows:
        files = {"train": list(_listed(self.path)), "test": list(_listed(self.eval_path))}
        try:
            with _silent_library():
                found = load_dataset("json", data_files={k: v for k, v in files.items() if v})
        except DatasetsError as error:
            self._name_bad_line()
            cause = error.__cause__ or error
            msg = f"`path` must hold rows with the same columns; cannot read {self.path!r}: {cause}"
            raise ValueError(msg) from error
        return Rows(found["train"], found["test"] if self.eval_path else None)

    def _name_bad_line(self) -> None:
        """Raise `ValueError` for the first line that is not a JSON object."""
        for name in ("path", "eval_path"):
            for file in _listed(getattr(self, name)):
                with Path(file).open("rb") as lines:
                    for number, line in enumerate(lines, start=1):
                        if line.strip() and not _is_object(line):
                            got = f"line {number} of {file!r}: {line.strip()[:60]!r}"
                            msg = f"`{name}` must hold one JSON object per line, got {got}"
                            raise ValueError(msg)


@final
@dataclass(frozen=True, kw_only=True)
class TextSource(_FilesSource):
    """Text files: one row per line or per file. The column is ``text``."""

    type: Literal["text"] = "text"

    rows_are: Literal["lines", "files"] = "lines"
    """Whether a row is a line or a whole file. Empty lines are left out."""

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
    """Suppress the log of `datasets`; turn its exceptions into one-line recipe errors."""
    level = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(level)


def _listed(files: Files | None) -> Sequence[str]:
    return [] if files is None else [files] if isinstance(files, str) else files
