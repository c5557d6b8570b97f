"""List the rows of a run with the highest and lowest losses, and those whose loss never falls."""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from mfwrap.records.row_losses import read_row_losses


@dataclass(frozen=True, kw_only=True, slots=True)
class ListedRow:
    """A row of the training data with its losses."""

    index: int
    """Index of the row in the data set."""

    epoch: int
    """Pass over the data in which the row was seen last."""

    position: int
    """Place of the row in the order of this pass, as in ``skip_rows``."""

    step: int
    """Last step that was trained on the row."""

    loss: float
    """Loss of the row in this step, which may be NaN or infinite."""

    first_loss: float
    """Loss of the row in the first step that was trained on it."""

    num_epochs: int
    """Number of passes in which the row was seen."""

    targets: int
    """Number of targets of the row."""

    source: str | None
    """Source of the row; ``None`` if the run did not have the loss by source."""


@final
class RowLists:
    """The rows of a run, ordered by their last losses. A loss of NaN counts as infinite.

    Rows without targets are left out.

    Args:
        run_folder: Run folder.

    Raises:
        FileNotFoundError: If the run has recorded no losses of rows.
        ImportError: If pyarrow is not installed.
        ValueError: If a file is damaged.
    """

    def __init__(self, run_folder: Path) -> None:
        table = read_row_losses(run_folder)
        table = table.filter(table["loss"].is_valid())
        names = ("index", "step", "epoch", "position", "loss", "targets")
        columns = {name: np.asarray(table[name]) for name in names}
        order = np.lexsort((columns["step"], columns["index"]))
        self._columns = {name: values[order] for name, values in columns.items()}
        self._sources = table["source"].take(order) if "source" in table.column_names else None
        index = self._columns["index"]
        self._first = np.flatnonzero(np.diff(index, prepend=-1))
        self._last = np.append(self._first[1:], len(index)) - 1 if len(index) else self._first
        self._losses = np.nan_to_num(self._columns["loss"], nan=np.inf, posinf=np.inf)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self._first)

    @property
    def num_records(self) -> int:
        """Number of times that a row was trained on."""
        return len(self._losses)

    def highest(self, number: int) -> list[ListedRow]:
        """Return the rows with the highest last losses, the highest first."""
        return self._listed(np.argsort(-self._losses[self._last], kind="stable")[:number])

    def lowest(self, number: int) -> list[ListedRow]:
        """Return the rows with the lowest last losses, the lowest first."""
        return self._listed(np.argsort(self._losses[self._last], kind="stable")[:number])

    def never_fell(self, number: int) -> list[ListedRow]:
        """Return rows of several epochs whose loss was never below the first one, highest first."""
        epochs = self._columns["epoch"]
        others = self._losses.copy()
        others[self._first] = np.inf
        lowest = np.minimum.reduceat(others, self._first) if len(self) else others
        stays = (epochs[self._last] > epochs[self._first]) & (lowest >= self._losses[self._first])
        order = np.argsort(-self._losses[self._last], kind="stable")
        return self._listed(order[stays[order]][:number])

    def _listed(self, rows: NDArray[np.int64]) -> list[ListedRow]:
        epochs = self._columns["epoch"]
        found = []
        for row in rows.tolist():
            first, last = int(self._first[row]), int(self._last[row])
            at: dict[str, Any] = {n: values[last].item() for n, values in self._columns.items()}
            source = None if self._sources is None else self._sources[last].as_py()
            first_loss = self._columns["loss"][first].item()
            num_epochs = len(np.unique(epochs[first : last + 1]))
            found.append(
                ListedRow(first_loss=first_loss, num_epochs=num_epochs, source=source, **at)
            )
        return found


LISTS = ("highest", "lowest", "never fell")
"""Names of the lists of `lists_of`."""


def lists_of(rows: RowLists, number: int) -> dict[str, list[ListedRow]]:
    """Return the lists of a run by their names in `LISTS`.

    Args:
        rows: Rows of the run.
        number: Largest number of rows in a list.
    """
    found = (rows.highest(number), rows.lowest(number), rows.never_fell(number))
    return dict(zip(LISTS, found, strict=True))


def table_lines(rows: list[ListedRow]) -> Iterator[str]:
    """Yield the lines of a table of rows, below a line with the names of the columns."""
    names = [each.name for each in fields(ListedRow)]
    names = [name for name in names if name != "source" or _have_sources(rows)]
    cells = [[name.replace("_", " ") for name in names]]
    cells += [[_text(getattr(row, name)) for name in names] for row in rows]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        yield "  ".join(f"{text:>{width}}" for text, width in zip(line, widths, strict=True))


def _have_sources(rows: list[ListedRow]) -> bool:
    return any(row.source is not None for row in rows)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
