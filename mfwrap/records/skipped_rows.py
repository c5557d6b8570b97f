"""Read files that list rows of the training data to leave out."""

import json
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from mfwrap.arguments import described


class SkippedRow(NamedTuple):
    """A row of the training data at its place in the order of one pass over the data."""

    epoch: int
    """Number of the pass over the data, from 0."""

    position: int
    """Number of the row in the order of this pass, from 0, counted over all ranks."""


def unknown_source(index: int) -> str | None:
    """Return ``None``: nothing is known about where the row with an index comes from."""
    del index
    return None


@dataclass(frozen=True, slots=True)
class RowPlace:
    """Where a row of a batch is in the training data."""

    index: int
    """Index of the row in the data set."""

    row: SkippedRow
    """Place of the row in the order of the sampler."""

    source_of: Callable[[int], str | None] = field(default=unknown_source, compare=False)
    """Returns file and line of the row with an index; ``None`` if they are unknown."""

    @property
    def source(self) -> str | None:
        """File and line that the row comes from, or its file; reads the file."""
        return self.source_of(self.index)


RowPlaces: TypeAlias = Callable[[int, Sequence[int]], Sequence[Sequence[RowPlace | None]]]
"""Function that returns the places of this rank's rows in a recent step: one sequence per
micro-batch, or none at all if they are unknown. Its arguments are the step, and the number of rows
of each of the rank's micro-batches."""


SkipRows: TypeAlias = Iterable[tuple[int, int]] | str | os.PathLike[str]
"""Pairs of an epoch and a position, or a file that `read_skipped_rows` reads."""


def read_skipped_rows(path: Path) -> frozenset[SkippedRow]:
    """Return the rows in a file with one JSON object per line, such as the following line.

    ``{"epoch": 0, "position": 12}``

    A line may have further keys, for example a note. Empty lines are left out.

    Args:
        path: The file, in UTF-8.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If a line is not such an object. The message names the file and the line.
    """
    rows = set()
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            content: Any = json.loads(line)
            rows.add(checked_row(content["epoch"], content["position"]))
        except (LookupError, RecursionError, TypeError, ValueError) as error:
            shown = line.decode("utf-8", "replace").strip()
            msg = (
                f'{path}:{number}: expected an object such as {{"epoch": 0, "position": 12}} with '
                f"two integers >= 0, got {shown[:80]}"
            )
            raise ValueError(msg) from error
    return frozenset(rows)


def skipped_rows(skip_rows: SkipRows) -> frozenset[SkippedRow]:
    """Return the rows of an argument `skip_rows`.

    Args:
        skip_rows: Pairs of an epoch and a position, or the path of a file.

    Raises:
        OSError: If the file cannot be read.
        TypeError: If `skip_rows` is neither a path nor an iterable of pairs of ints.
        ValueError: If a number is negative, or the file has a wrong line.
    """
    if isinstance(skip_rows, (str, os.PathLike)):
        return read_skipped_rows(Path(skip_rows))
    try:
        pairs = [tuple(each) for each in skip_rows]
        return frozenset(checked_row(epoch, position) for epoch, position in pairs)
    except (TypeError, ValueError) as error:
        msg = (
            "`skip_rows` must be the path of a file or pairs of ints >= 0 (epoch, position), got "
            f"{described(skip_rows):.200}"
        )
        raise (TypeError if isinstance(error, TypeError) else ValueError)(msg) from error


def checked_row(epoch: object, position: object) -> SkippedRow:
    """Return a row after a check of its numbers.

    Raises:
        TypeError: If a number is not an int.
        ValueError: If a number is negative.
    """
    for number in (epoch, position):
        if type(number) is not int:
            msg = f"expected an int, got {described(number)}"
            raise TypeError(msg)
        if number < 0:
            msg = f"expected an int >= 0, got {number}"
            raise ValueError(msg)
    return SkippedRow(epoch, position)  # type: ignore[arg-type]  # (the loop has checked both)
