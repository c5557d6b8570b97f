"""Data of the library `datasets`: the hub, saved data sets, and files that it reads."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from datasets import Dataset, DatasetDict, load_dataset, load_from_disk
from datasets.exceptions import DatasetsError

from mfwrap.arguments import check_int
from mfwrap.recipes.data import streams
from mfwrap.recipes.data.files import Files, listed, reading_locally
from mfwrap.recipes.data.images import IMAGE_ENDINGS
from mfwrap.recipes.data.places import check_place, is_folder
from mfwrap.recipes.data.source import NO_NEEDS, DataSource, Needs, Rows

SAVED = ("dataset_info.json", "dataset_dict.json")
"""A folder written by ``save_to_disk`` has one of these files."""

BUILDERS = frozenset({"arrow", "csv", "imagefolder", "json", "parquet", "text", "webdataset"})
"""Builders of the library that read files and run no code of the files. ``pandas``, which reads
pickles, is left out."""


@final
@dataclass(frozen=True, kw_only=True)
class DatasetsSource(DataSource):
    """A data set that the library `datasets` loads: ``load_dataset(path, name, ...)``."""

    type: Literal["datasets"] = "datasets"

    path: str
    """Name on the hub, a folder with data files, a folder written by ``Dataset.save_to_disk``, or
    the name of a builder, such as ``csv``, which needs `data_files`."""

    name: str | None = None
    """Configuration of the data set on the hub."""

    revision: str | None = None
    """Branch, tag or commit on the hub."""

    data_files: Files | dict[str, Files] | None = None
    """Files to read, relative to `path`: a file or pattern, a list, or either for each split."""

    data_dir: str | None = None
    """Folder below `path` with the files to read."""

    split: str = "train"
    """Split with training rows; also a part of one, such as ``train[:10%]``."""

    eval_split: str | None = None
    """Split with held-out rows. Without it, `eval_fraction` of the rows is held out."""

    streaming: bool = False
    """Read the training rows while the training goes on, in their order, and store none of them.
    Without `eval_split`, the first `max_eval_samples` rows are held out."""

    shuffle_buffer: int | None = None
    """With `streaming`: number of rows from which the next row is drawn at random, with
    `split_seed`. By default, the rows keep their order."""

    def __post_init__(self) -> None:
        """Check that the path can be loaded, and that local files exist."""
        super().__post_init__()
        self._check_path()
        if self.shuffle_buffer is not None:
            check_int("shuffle_buffer", self.shuffle_buffer, minimum=2)
            if not self.streaming:
                msg = f"`shuffle_buffer` needs `streaming: true`, got {self.shuffle_buffer}"
                raise ValueError(msg)
        for key in ("loss_by", "row_losses"):
            if self.streaming and getattr(self, key):
                got = getattr(self, key)
                msg = f"`{key}` needs rows with an index, which streamed rows have not, got {got!r}"
                raise ValueError(msg)
        if self._is_saved:
            _check_saved(self)

    def _check_path(self) -> None:
        if self.path == "pandas":
            msg = f"`path` must be one of {sorted(BUILDERS)}, because pickles can run any code"
            msg = f"{msg}, got {self.path!r}"
            raise ValueError(msg)
        if self.path in BUILDERS and not is_folder(self.path):
            if self.data_files is None and self.data_dir is None:
                msg = f"`path` {self.path!r} is a builder of datasets and needs `data_files`"
                raise ValueError(msg)
        elif not is_folder(self.path):
            check_place("path", self.path, (), "a data set")
        elif not self._is_saved and not _has_files(self.path):
            says = "a folder with data files or a data set saved by `Dataset.save_to_disk`"
            msg = f"`path` must be {says}, got the folder {self.path!r}"
            raise ValueError(msg)

    @property
    def why_unread(self) -> str | None:
        if is_folder(self.path):
            return None
        if self.path in BUILDERS:
            files = _names(self.data_files)
            is_remote = any("://" in file for file in [*files, self.data_dir or ""])
            return "the data are on the network" if is_remote else None
        return "the data are on the hub"

    @property
    def is_streamed(self) -> bool:
        return self.streaming

    def rows(self, needs: Needs = NO_NEEDS) -> Rows:
        """Return the rows; those of a stream are checked as they are read."""
        if not self.streaming:
            return super().rows(needs)
        train = streams.renamed(self._split(self.split), self.columns)
        number = self.max_eval_samples
        held_out = None
        if self.eval_split is not None:
            stream = streams.renamed(self._split(self.eval_split, "eval_split"), self.columns)
            held_out = streams.held_out_rows(stream, number)
        elif number is not None:
            held_out = streams.held_out_rows(train, number)
            train = train.skip(number)
        if held_out is not None:
            needs.check(held_out)
        train = streams.checked(train, needs.check)
        if self.shuffle_buffer is not None:
            train = train.shuffle(seed=self.split_seed, buffer_size=self.shuffle_buffer)
        if self.max_train_samples is not None:
            train = train.take(self.max_train_samples)
        return Rows(train, held_out)

    def read(self) -> Rows:
        train = self._split(self.split)
        held_out = self._split(self.eval_split, "eval_split") if self.eval_split else None
        return Rows(train, held_out)

    def _files_of(self, split: str) -> Files | dict[str, Files] | None:
        """Return the files to read for a split: `datasets` would read those of all splits."""
        name = split.partition("[")[0]
        if isinstance(self.data_files, dict) and name in self.data_files and "+" not in split:
            return {name: self.data_files[name]}
        return self.data_files

    @property
    def _is_saved(self) -> bool:
        return any(Path(self.path, file).is_file() for file in SAVED)

    def _split(self, split: str, setting: str = "split") -> Dataset:
        if not self._is_saved:
            options: dict[str, Any] = {
                "split": split,
                "revision": self.revision,
                "data_files": self._files_of(split),
                "data_dir": self.data_dir,
                "streaming": self.streaming,
            }
            if self.why_unread is not None:
                return load_dataset(self.path, self.name, **options)
            try:
                with reading_locally():
                    return load_dataset(self.path, self.name, **options)
            except (DatasetsError, ValueError) as error:
                says = f"a split that can be read, got {split!r}: {error.__cause__ or error}"
                msg = f"`{setting}` must be {says}"
                raise ValueError(msg) from error
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


def _check_saved(source: DatasetsSource) -> None:
    """Check that only the keys are set that apply to a saved data set."""
    for key in ("name", "revision", "data_files", "data_dir", "streaming"):
        if getattr(source, key) not in (None, False):
            says = "left out for a data set saved by `Dataset.save_to_disk`"
            msg = f"`{key}` must be {says}, got {getattr(source, key)!r:.60}"
            raise ValueError(msg)


def _names(files: Files | dict[str, Files] | None) -> list[str]:
    groups = files.values() if isinstance(files, dict) else [files or []]
    return [file for group in groups for file in listed(group)]


def _has_files(folder: str) -> bool:
    """Return whether a folder, or a folder inside it, has files that `datasets` may read."""
    endings = {".arrow", ".csv", ".json", ".jsonl", ".ndjson", ".parquet", ".tar", ".tsv", ".txt"}
    return any(
        one.suffix.lower() in endings | IMAGE_ENDINGS or one.suffix == ".gz"
        for one in Path(folder).rglob("*")
    )
