"""The base of every source of data, and of every section of a recipe."""

import abc
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, Literal, NamedTuple

from datasets import Dataset, DatasetDict, IterableDataset

from mfwrap.arguments import check_int

SOURCE = "source"
"""Column of prepared training rows that names where each of them comes from."""


class RecipeSection:
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
        others: Numbers of other rows that do not fit either.
    """

    def __init__(self, message: str, row: int | None = None, others: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.row = row
        self.others = others


_NAMED = 10
"""Number of rows that an error names in addition to the first one."""

ColumnUse = Literal["text", "number", "class"]
"""What a task uses the values of a column as."""


class Needs(NamedTuple):
    """What a task needs from the data."""

    uses: Mapping[str, ColumnUse] = MappingProxyType({})
    """What the task uses columns as, by the user's names."""

    check: Callable[[Dataset], None] = lambda _: None
    """Called with rows whose columns have the task's names. It must raise `DataError` if a row is
    unsuitable for the task."""

    check_numbers: Callable[[Dataset], None] = lambda _: None
    """Called with the columns that will make a list of numbers, with the user's names. It must
    raise `DataError` if a value is not a number."""


NO_NEEDS = Needs()
"""Needs of no task: the rows are read as they are."""


Columns = Mapping[str, str | list[str]]
"""The key ``columns``: name of a column in the data, or a list of names, by the task's name."""


class Rows(NamedTuple):
    """Training rows, and held-out rows for evaluation."""

    train: Dataset | IterableDataset
    evaluation: Dataset | None = None

    @property
    def are_inputs(self) -> bool:
        """Whether the rows are the inputs of the model, and not a table with a task's columns."""
        return not isinstance(self.train, (Dataset, IterableDataset))

    def prepared(self, prepare: Callable[[Any], Any]) -> dict[str, Dataset | None]:
        """Apply a function to both data sets, and return them as keywords of the Trainer."""
        evaluation = None if self.evaluation is None else prepare(self.evaluation)
        return {"train_dataset": prepare(self.train), "eval_dataset": evaluation}


@dataclass(frozen=True, kw_only=True)
class DataSource(RecipeSection, abc.ABC):
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
    text is cut by itself. With `template`, each sequence has as many whole texts as fit."""

    template: Literal["alpaca"] | None = None
    """For ``causal_lm``: format of the columns ``instruction``, ``output`` and, if a row has one,
    ``input``. Only the answer is learned. By default, the column ``text`` is learned as it is."""

    separate_texts: bool | None = None
    """With `template` and `packing`: whether tokens attend only to tokens of their own text, which
    is the default."""

    targets: Literal["next_token", "mindformers"] | None = None
    """With `template`: what a token predicts, by default the next token. With `packing`,
    ``mindformers`` is what MindFormers from 1.7 on computes: the token after the next one, and
    token 0 at the end of each text."""

    loss_by: str | None = None
    """Column of the training rows that names the source of each row; the log then has the loss by
    source, see `MFTrainer`. If `path` is a mapping of names to files, these names by default."""

    row_losses: bool = False
    """Write the loss of each training row to the run folder; see `MFTrainer`."""

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
        needed = {"separate_texts": self.template and self.packing, "targets": self.template}
        for name, is_set in needed.items():
            if getattr(self, name) is not None and not is_set:
                needs = "`template` and `packing`" if name == "separate_texts" else "`template`"
                msg = f"`{name}` needs {needs}, got {getattr(self, name)} without"
                raise ValueError(msg)
        if not 0 <= self.split_seed < 2**32:
            msg = f"`split_seed` must be in [0, 2**32), got {self.split_seed}"
            raise ValueError(msg)
        if self.known_columns is not None:
            _check_columns(self.columns, self.known_columns)
            if self.loss_by is not None:
                _check_source(self.loss_by, self.known_columns)

    @property
    def source_column(self) -> str | None:
        """Column that names the source of each training row; ``None`` without one."""
        return self.loss_by

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

    @abc.abstractmethod
    def read(self) -> Rows:
        """Read all rows, with the column names of the source."""

    def read_as(self, uses: Mapping[str, ColumnUse]) -> Rows:
        """Read all rows, with types that fit the task if values have no types of their own.

        Args:
            uses: What the task uses columns as, by the user's names. The columns may be missing.
        """
        del uses
        return self.read()

    def origin(self, *, held_out: bool) -> str | None:
        """Return the file that rows come from, for error messages; ``None`` without a file.

        Args:
            held_out: Whether the rows are those for evaluation.
        """
        del held_out
        return None

    def place(self, row: int, *, held_out: bool) -> str | None:
        """Return file and line of a row; ``None`` if the rows are not lines of files.

        Args:
            row: Number of the row, counted from 1.
            held_out: Whether it is a row for evaluation.
        """
        del row, held_out
        return None

    def where(self, row: int, *, held_out: bool) -> str:
        """Return the place of a row in words; see `place`."""
        at = self.place(row, held_out=held_out)
        return f"in row {row} (counted from 1)" if at is None else f"at {at}"

    def source_of_training_row(self, index: int, number: int) -> str | None:
        """Return file and line of a training row; ``None`` if the rows are not lines of files.

        Args:
            index: Index among the training rows, after some were held out.
            number: Number of all rows that were read.
        """
        row = index
        if self._holds_out(number):
            # The same numbers are drawn for any table of this length.
            numbers = Dataset.from_dict({"row": range(number)})
            row = self._held_apart(numbers)["train"][index]["row"]
        return self.place(row + 1, held_out=False)

    def _holds_out(self, number: int) -> bool:
        has_own = getattr(self, "eval_path", None) is not None
        return bool(self.eval_fraction) and number > 1 and not has_own

    def _held_apart(self, rows: Dataset) -> DatasetDict:
        return rows.train_test_split(self.eval_fraction, seed=self.split_seed)

    def rows(self, needs: Needs = NO_NEEDS) -> Rows:
        """Return training rows and held-out rows, with columns renamed as the task names them.

        Args:
            needs: What the task needs. The checks are called with all rows of the source before
                some are held out, and with the source's own evaluation rows.

        Raises:
            ValueError: If a column in the key ``columns`` is missing in the data.
            DataError: If there are no training rows, or if a check raises it.
        """
        return self.divided(self.read_as(needs.uses), needs)

    def divided(self, rows: Rows, needs: Needs) -> Rows:
        """Check rows that were read, rename their columns, and hold out rows; see `rows`."""
        train, evaluation = self._prepared(needs, rows.train, held_out=False), rows.evaluation
        if evaluation is not None:
            evaluation = self._prepared(needs, evaluation, held_out=True)
        elif self._holds_out(len(train)):
            parts = self._held_apart(train)
            train, evaluation = parts["train"], parts["test"]
        if not len(train):
            msg = "`data` must have training rows, got none"
            raise DataError(msg)
        return Rows(
            _first(train, self.max_train_samples),
            None if evaluation is None else _first(evaluation, self.max_eval_samples),
        )

    def _prepared(self, needs: Needs, rows: Dataset, *, held_out: bool) -> Dataset:
        """Return rows with the task's columns, after both checks."""
        _check_columns(self.columns, rows.column_names, self.origin(held_out=held_out))
        for names in self.columns.values():
            if isinstance(names, list) and {needs.uses.get(name) for name in names} == {"number"}:
                # Before they are joined, the error for a wrong number names its own column.
                _check(self, needs.check_numbers, rows.select_columns(names), held_out=held_out)
        sources = None
        if self.source_column is not None and not held_out:
            _check_source(self.source_column, rows.column_names)
            sources = list(map(str, rows[self.source_column]))
        rows = _renamed(rows, self.columns)
        if sources is not None:
            rows = rows.remove_columns(SOURCE) if SOURCE in rows.column_names else rows
            rows = rows.add_column(SOURCE, sources)
        _check(self, needs.check, rows, held_out=held_out)
        return rows


def _check(
    source: DataSource, check: Callable[[Dataset], None], rows: Dataset, *, held_out: bool
) -> None:
    """Call a check, and add the place of the row, or else the file of the rows, to its error."""
    try:
        check(rows)
    except DataError as error:
        where, of = "", " of the held-out rows" if held_out else ""
        if error.row is not None:
            file = source.origin(held_out=held_out)
            place = source.place(error.row, held_out=held_out)
            where = f", at {place}" if place else f", in {file}" if file else ""
        msg = f"{error}{of}{where}{_also(error.others)}"
        raise DataError(msg, error.row) from error


def _also(rows: Sequence[int]) -> str:
    """Return the end of an error that names other rows with a fault, the first of them."""
    if len(rows) < 2:
        return "".join(f"; nor does row {row} fit" for row in rows)
    listed, rest = ", ".join(map(str, rows[:_NAMED])), len(rows) - _NAMED
    more = f" and {rest:,} more" if rest > 0 else ""
    return f"; nor do {len(rows):,} other rows fit: {listed}{more}"


def _check_columns(columns: Columns, known: Collection[str], origin: str | None = None) -> None:
    for theirs in columns.values():
        for column in [theirs] if isinstance(theirs, str) else theirs:
            if column not in known:
                got = f"{column!r}{'' if origin is None else f', which is missing in {origin}'}"
                msg = f"`columns` must have values among {sorted(known)}, got {got}"
                raise ValueError(msg)


def _check_source(column: str, known: Collection[str]) -> None:
    if column not in known:
        msg = f"`loss_by` must be a column of the training rows, {sorted(known)}, got {column!r}"
        raise ValueError(msg)


def kept_columns(rows: Any, names: Collection[str]) -> list[str]:
    """Return names of columns, with `SOURCE` if the rows have it."""
    return [*names, *(name for name in rows.column_names or () if name == SOURCE)]


def _renamed(rows: Dataset, columns: Columns) -> Dataset:
    joined = {
        ours: _joined(rows, names) for ours, names in columns.items() if isinstance(names, list)
    }
    for ours, theirs in columns.items():
        if isinstance(theirs, str) and ours != theirs:
            if ours in rows.column_names:
                rows = rows.remove_columns(ours)
            rows = rows.rename_column(theirs, ours)
    for ours, values in joined.items():
        if ours in rows.column_names:
            rows = rows.remove_columns(ours)
        rows = rows.add_column(ours, values)
    return rows


def _joined(rows: Dataset, names: Sequence[str]) -> list[list[Any]]:
    """Return the values of several columns as one list per row."""
    types = {str(rows.features[name]) for name in names}
    if len(types) > 1 and any("string" in one for one in types):
        listed = ", ".join(f"{name}: {rows.features[name]}" for name in names)
        msg = f"`columns` must have lists of columns of one type, got {listed:.200}"
        raise ValueError(msg)
    values = zip(*(rows[name] for name in names), strict=True)
    # A column of lists has values of one type; numbers of several types become floats.
    return [[one if len(types) == 1 else _number(one) for one in row] for row in values]


def _number(value: Any) -> Any:
    return float(value) if isinstance(value, (bool, int)) else value


def _first(rows: Dataset, number: int | None) -> Dataset:
    return rows if number is None else rows.select(range(min(number, len(rows))))
