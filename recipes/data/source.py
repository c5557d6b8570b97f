"""Where the rows of a training come from, whatever their source."""

import abc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from datasets import Dataset

__all__ = [
    "DataError",
    "DataSource",
    "Rows",
    "Section",
]


class Section:
    """Base of the frozen dataclasses that a section of a recipe becomes.

    A section refuses keys that it does not know and values of another type; an int is a float.
    Bad values and bad pairs are refused in ``__post_init__`` by a ``ValueError`` whose message
    begins with the key in backticks.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}


class DataError(ValueError):
    """What is wrong with the data of a recipe; begins with the key or the column."""


class Rows(NamedTuple):
    """Rows to train with, and rows that are held out."""

    train: Dataset
    evaluation: Dataset | None


@dataclass(frozen=True, kw_only=True)
class DataSource(Section, abc.ABC):
    """The keys that every ``data`` section has.

    Raises:
        ValueError: If a value is out of range.
    """

    known_columns: ClassVar[frozenset[str] | None] = None
    """Columns of every row; ``None`` where they are known only once the data is read."""

    columns: dict[str, str] = field(default_factory=dict)
    """The source's name of a column, by the name that the task has for it: ``{text: body}``."""

    eval_fraction: float = 0.1
    """Share of the rows that is held out where the source has no rows for evaluation; 0: none."""

    split_seed: int = 0
    """Seed of the choice of held-out rows."""

    max_train_samples: int | None = None
    """Rows that are taken of those to train with; ``None`` for all."""

    max_eval_samples: int | None = None
    """Rows that are taken of those that are held out; ``None`` for all."""

    sequence_length: int | None = None
    """Longest sequence of tokens, where the task makes tokens by itself."""

    packing: bool | None = None
    """Cut the concatenation of all texts, instead of each text, into sequences (``causal_lm``)."""

    def __post_init__(self) -> None:
        """Refuse values out of range."""
        if not 0 <= self.eval_fraction < 1:
            msg = f"`eval_fraction` must be in [0, 1), got {self.eval_fraction}"
            raise ValueError(msg)
        limits = {"max_train_samples": 1, "max_eval_samples": 1, "sequence_length": 2}
        for name, limit in limits.items():
            value = getattr(self, name)
            if value is not None and value < limit:
                msg = f"`{name}` must be >= {limit}, got {value}"
                raise ValueError(msg)
        if not 0 <= self.split_seed < 2**32:
            msg = f"`split_seed` must be in [0, 2**32), got {self.split_seed}"
            raise ValueError(msg)

    @abc.abstractmethod
    def read(self) -> Rows:
        """Read all rows, with the source's own names of columns."""

    def rows(self, check: Callable[[Dataset], None] = lambda _: None) -> Rows:
        """Return the rows to train with and those held out, with the task's names of columns.

        Args:
            check: Is given all rows as they are in the source, of which some are held out later,
                and raises `DataError` where they do not fit.

        Raises:
            ValueError: If a column of `columns` is not there, or no row is left.
        """
        rows = self.read()
        train, evaluation = self._renamed(rows.train), rows.evaluation
        check(train)
        if evaluation is not None:
            evaluation = self._renamed(evaluation)
            try:
                check(evaluation)
            except DataError as error:
                msg = f"{error}, of those that are held out"
                raise DataError(msg) from error
        elif self.eval_fraction and len(train) > 1:
            parts = train.train_test_split(self.eval_fraction, seed=self.split_seed)
            train, evaluation = parts["train"], parts["test"]
        if not len(train):
            msg = "`data` must have rows to train with, got none"
            raise DataError(msg)
        return Rows(
            _first(train, self.max_train_samples),
            None if evaluation is None else _first(evaluation, self.max_eval_samples),
        )

    def _renamed(self, rows: Dataset) -> Dataset:
        for ours, theirs in self.columns.items():
            if theirs not in rows.column_names:
                msg = f"`columns` must name columns of {rows.column_names}, got {theirs!r}"
                raise ValueError(msg)
            if ours != theirs and ours in rows.column_names:
                rows = rows.remove_columns(ours)
            rows = rows.rename_column(theirs, ours)
        return rows


def _first(rows: Dataset, number: int | None) -> Dataset:
    return rows if number is None else rows.select(range(min(number, len(rows))))
