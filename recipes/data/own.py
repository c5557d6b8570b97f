"""Data of the user's own class or function."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch
from datasets import Dataset, IterableDataset
from torch.utils.data import Subset

from mfwrap.recipes.data.source import NO_NEEDS, DataError, DataSource, Needs, Rows


@final
@dataclass(frozen=True, kw_only=True)
class OwnSource(DataSource):
    """A data set of the author's own code.

    A ``datasets.Dataset`` or a list of dictionaries is a table with the columns of the task.
    A ``torch.utils.data.Dataset``, or anything else that has ``__getitem__``, has the inputs of the
    model as its rows. A pair has training rows and held-out rows.
    """

    type: str = ""
    """Name of the class or function."""

    make: Callable[[], Any] | None = None
    """Builds the data set; ``None`` if the recipe may not run code."""

    @property
    def why_unread(self) -> str | None:
        if self.make is not None:
            return None
        return f"its data come from the code of {self.type}, which runs only with --allow-code"

    def read(self) -> Rows:
        if self.make is None:
            msg = f"`type` needs --allow-code to read data, got {self.type!r} without it"
            raise DataError(msg)
        found = self.make()
        parts = found if isinstance(found, tuple) else (found, None)
        if len(parts) != 2:
            msg = (
                "`type` must give a data set, or a pair of training rows and held-out rows, got a "
                f"tuple of {len(parts)}"
            )
            raise DataError(msg)
        rows = Rows(*(None if part is None else _table(part) for part in parts))
        if rows.evaluation is not None and Rows(rows.evaluation).are_inputs != rows.are_inputs:
            got = f"{_kind(rows.train)} and {_kind(rows.evaluation)}"
            msg = f"`type` must give training rows and held-out rows of one kind, got {got}"
            raise DataError(msg)
        return rows

    def rows(self, needs: Needs = NO_NEEDS) -> Rows:
        """Return the rows; those that are inputs of the model are not checked and not renamed."""
        rows = self.read()
        return self._inputs(rows) if rows.are_inputs else self.divided(rows, needs)

    def _inputs(self, rows: Rows) -> Rows:
        if self.columns:
            msg = (
                "`columns` must be left out, because the rows are the inputs of the model, got "
                f"{self.columns}"
            )
            raise DataError(msg)
        train, evaluation = rows
        number = len(train) if hasattr(train, "__len__") else None
        if number == 0:
            msg = "`data` must have training rows, got none"
            raise DataError(msg)
        if evaluation is None and number is not None and number > 1 and self.eval_fraction:
            # As many as `train_test_split` of a table holds out.
            held_out = math.ceil(number * self.eval_fraction)
            order = torch.randperm(number, generator=torch.Generator().manual_seed(self.split_seed))
            evaluation = Subset(train, order[:held_out].sort().values.tolist())
            train = Subset(train, order[held_out:].sort().values.tolist())
        return Rows(
            _first("max_train_samples", train, self.max_train_samples),
            _first("max_eval_samples", evaluation, self.max_eval_samples),
        )


def _table(rows: Any) -> Any:
    if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
        return Dataset.from_list(rows)
    # The Trainer takes no other iterables: not a generator, and not a DataLoader.
    has_rows = hasattr(rows, "__getitem__") or isinstance(rows, torch.utils.data.IterableDataset)
    if not has_rows or isinstance(rows, (str, bytes, dict, IterableDataset)):
        msg = (
            "`type` must give a datasets.Dataset, a list of dictionaries or a "
            f"torch.utils.data.Dataset, got {_kind(rows)}"
        )
        raise DataError(msg)
    return rows


def _kind(rows: Any) -> str:
    return f"a {type(rows).__module__}.{type(rows).__qualname__}"


def _first(key: str, rows: Any, number: int | None) -> Any:
    if rows is None or number is None:
        return rows
    if not hasattr(rows, "__len__"):
        msg = f"`{key}` must be left out, because the rows have no length, got {number}"
        raise DataError(msg)
    return Subset(rows, range(min(number, len(rows))))
