"""Rows that are read while the training goes on, and are not stored."""

import itertools
from collections.abc import Callable
from typing import Any

from datasets import Dataset, IterableDataset

from mfwrap.recipes.data.source import DataError

_BATCH = 100
"""Number of rows that are checked together."""


def held_out_rows(stream: IterableDataset, number: int | None) -> Dataset:
    """Read the first rows of a stream.

    Args:
        stream: The rows.
        number: Number of rows; ``None`` for all rows.
    """
    rows = list(itertools.islice(iter(stream), number))
    return Dataset.from_list(rows, features=stream.features)


def renamed(stream: IterableDataset, columns: dict[str, str | list[str]]) -> IterableDataset:
    """Return a stream with its columns renamed as `DataSource.columns` says.

    Raises:
        ValueError: If a column is missing. A list of columns is not supported in a stream.
    """
    names = column_names(stream)
    for ours, theirs in columns.items():
        if isinstance(theirs, list):
            msg = f"`columns.{ours}` must be one column, because rows are streamed, got {theirs}"
            raise ValueError(msg)  # noqa: TRY004  (a wrong value of a recipe)
        if theirs not in names:
            msg = f"`columns` must have values among {sorted(names)}, got {theirs!r}"
            raise ValueError(msg)
        if ours != theirs:
            stream = stream.remove_columns(ours) if ours in names else stream
            stream = stream.rename_column(theirs, ours)
    return stream


def column_names(rows: Dataset | IterableDataset) -> list[str]:
    """Return the names of the columns; for a stream that does not tell them, of its first row."""
    if rows.column_names is not None:
        return list(rows.column_names)
    return list(next(iter(rows), {}))


def checked(stream: IterableDataset, check: Callable[[Dataset], None]) -> IterableDataset:
    """Return a stream that checks its rows as they are read.

    Args:
        stream: The rows.
        check: Raises `DataError` if a row is unsuitable. It is called with 100 rows at a time. The
            error that is raised while the stream is read has the number of the row in the stream.
    """
    features = stream.features

    def check_batch(batch: dict[str, list[Any]], indices: list[int]) -> dict[str, list[Any]]:
        try:
            check(Dataset.from_dict(batch, features=features))
        except DataError as error:
            if error.row is None:
                raise
            row = indices[0] + error.row
            msg = str(error).replace(f"in row {error.row} (", f"in row {row} (")
            raise DataError(msg, row) from error
        return batch

    return stream.map(
        check_batch, batched=True, batch_size=_BATCH, with_indices=True, features=features
    )
