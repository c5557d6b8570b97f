"""The base of every source of data, and of every section of a recipe."""

import abc
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from datasets import Dataset, IterableDataset

from mfwrap.arguments import check_int


class Section:
    """Base of the frozen dataclasses that the sections of a recipe are parsed into.

    Unknown keys and values of a wrong type are errors; an int is accepted for a float. Values out
    of range raise a ``ValueError`` in ``__post_init__``. Its message must begin with the key in
    backticks: the `RecipeError` that the user sees then names this key and its line.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}


class DataError(ValueError):
    """A fault in the data of a recipe; the message begins with the key in backticks, or `data`.

    Args:
        message: The message.
        row: Number of the faulty row, counted from 1; ``None`` if the fault is not in one row.
    """

    def __init__(self, message: str, row: int | None = None) -> None:
        super().__init__(message)
        self.row = row


class Rows(NamedTuple):
    """Training rows, and held-out rows for evaluation."""

    train: Dataset | IterableDataset
    evaluation: Dataset | None

    def prepared(self, prepare: Callable[[Any], Any]) -> dict[str, Dataset | None]:
        """Apply a function to both data sets, and return them as keywords of the Trainer."""
        evaluation = None if self.evaluation is None else prepare(self.evaluation)
        return {"train_dataset": prepare(self.train), "eval_dataset": evaluation}


@dataclass(frozen=True, kw_only=True)
class DataSource(Section, abc.ABC):
    """The keys that every ``data`` section has.

    Raises:
        ValueError: If a value is out of range, or a column in the key ``columns`` is missing in the
            source.
    """

    known_columns: ClassVar[frozenset[str] | None] = None
    """Columns of this source; ``None`` if they are known only after the data have been read."""

    columns: dict[str, str | list[str]] = field(default_factory=dict)
    """Name of a column in the data, keyed by the task's name for it: with ``{text: body}``, the
    column ``body`` is used as ``text``. With a list of names, each row has a list of their
    values: ``{features: [age, weight]}``."""

    eval_fraction: float = 0.1
    """Share of the rows to hold out if the source has no rows for evaluation; 0 holds out none."""

    split_seed: int = 0
    """Seed for the choice of held-out rows."""

    max_train_samples: int | None = None
    """Maximum number of training rows; ``None`` for all."""

    max_eval_samples: int | None = None
    """Maximum number of held-out rows; ``None`` for all."""

    sequence_length: int | None = None
    """Maximum number of tokens in a sequence, for tasks that tokenize the data themselves."""

    image_size: int | None = None
    """For ``image_classification``: width and height, in pixels, to which all images are scaled, in
    three colors. By default, all images must have the same size and the same channels."""

    packing: bool | None = None
    """For ``causal_lm``: concatenate all texts, and cut the result into sequences. By default, each
    text is cut by itself."""

    def __post_init__(self) -> None:
        """Check that values are in range and columns are known."""
        if not 0 <= self.eval_fraction < 1:
            msg = f"`eval_fraction` must be in [0, 1), got {self.eval_fraction}"
            raise ValueError(msg)
        limits = {
            "max_train_samples": 1,
            "max_eval_samples": 1,
            "sequence_length": 2,
            "image_size": 1,
        }
        for name, limit in limits.items():
            value = getattr(self, name)
            if value is not None:
                check_int(name, value, minimum=limit)
        if not 0 <= self.split_seed < 2**32:
            msg = f"`split_seed` must be in [0, 2**32), got {self.split_seed}"
            raise ValueError(msg)
        if self.known_columns is not None:
            self._check_columns(self.known_columns)

    @property
    def why_unread(self) -> str | None:
        """Why the rows cannot be read without a network; ``None`` if they can be."""
        return None

    @property
    def column_labels(self) -> dict[str, str]:
        """The user's name of each column in `columns`, for messages, by the task's name."""
        return {
            ours: theirs if isinstance(theirs, str) else ", ".join(theirs)
            for ours, theirs in self.columns.items()
        }

    @property
    def is_streamed(self) -> bool:
        """Whether the training rows are read while the training goes on."""
        return False

    def with_texts(self, columns: Collection[str]) -> "DataSource":
        """Return a source that reads columns as texts if their values have no types of their own.

        Args:
            columns: The user's names of columns that the task needs as texts. They may be missing.
        """
        del columns
        return self

    @abc.abstractmethod
    def read(self) -> Rows:
        """Read all rows, with the column names of the source."""

    def place(self, row: int, *, held_out: bool) -> str | None:
        """Return file and line of a row; ``None`` if the rows are not lines of files.

        Args:
            row: Number of the row, counted from 1.
            held_out: Whether it is a row for evaluation.
        """
        del row, held_out
        return None

    def rows(self, check: Callable[[Dataset], None] = lambda _: None) -> Rows:
        """Return training rows and held-out rows, with columns renamed as the task names them.

        Args:
            check: Called with all rows of the source before some are held out, and with the
                source's own evaluation rows. It must raise `DataError` if a row is unsuitable for
                the task.

        Raises:
            ValueError: If a column in the key ``columns`` is missing in the data.
            DataError: If there are no training rows, or if `check` raises it.
        """
        rows = self.read()
        train, evaluation = self._renamed(rows.train), rows.evaluation
        self._check(check, train, held_out=False)
        if evaluation is not None:
            evaluation = self._renamed(evaluation)
            self._check(check, evaluation, held_out=True)
        elif self.eval_fraction and len(train) > 1:
            parts = train.train_test_split(self.eval_fraction, seed=self.split_seed)
            train, evaluation = parts["train"], parts["test"]
        if not len(train):
            msg = "`data` must have training rows, got none"
            raise DataError(msg)
        return Rows(
            _first(train, self.max_train_samples),
            None if evaluation is None else _first(evaluation, self.max_eval_samples),
        )

    def _check(self, check: Callable[[Dataset], None], rows: Dataset, *, held_out: bool) -> None:
        """Call `check`, and add the place of the row to its error."""
        try:
            check(rows)
        except DataError as error:
            place = None if error.row is None else self.place(error.row, held_out=held_out)
            of = " of the held-out rows" if held_out else ""
            msg = f"{error}{of}{'' if place is None else f', at {place}'}"
            raise DataError(msg, error.row) from error

    def _check_columns(self, known: Collection[str]) -> None:
        for theirs in self.columns.values():
            for column in [theirs] if isinstance(theirs, str) else theirs:
                if column not in known:
                    msg = f"`columns` must have values among {sorted(known)}, got {column!r}"
                    raise ValueError(msg)

    def _renamed(self, rows: Dataset) -> Dataset:
        self._check_columns(rows.column_names)
        lists = {ours: names for ours, names in self.columns.items() if isinstance(names, list)}
        joined = {
            ours: [list(values) for values in zip(*(rows[name] for name in names), strict=True)]
            for ours, names in lists.items()
        }
        for ours, theirs in self.columns.items():
            if isinstance(theirs, str) and ours != theirs:
                if ours in rows.column_names:
                    rows = rows.remove_columns(ours)
                rows = rows.rename_column(theirs, ours)
        for ours, values in joined.items():
            if ours in rows.column_names:
                rows = rows.remove_columns(ours)
            rows = rows.add_column(ours, values)
        return rows


def _first(rows: Dataset, number: int | None) -> Dataset:
    return rows if number is None else rows.select(range(min(number, len(rows))))
