"""Write the records of steps to a CSV file."""

import csv
import io
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, final

from mfwrap.checkpoints.whole import whole_file
from mfwrap.records.json_lines import append_whole
from mfwrap.records.run_files import set_aside


@final
class CsvFile:
    """Append one row for each step to a CSV file.

    The first row has the names of the columns. If a later step has new names, the file is written
    anew with more columns, to a temporary name that is then renamed; earlier rows have empty cells
    there. A row that a crash has cut off, and rows of steps that a resumed run makes again, are
    removed when the file is opened. A file without a row to go on from, such as that of an earlier
    run when a run starts anew, or one that a spreadsheet has saved in another form, is renamed to
    ``<name>.1``, with a warning.

    Args:
        path: The file. It is created with the first row.
        first_step: Number of steps before this run; 0 for a run from the start.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self._path = path
        self._columns: list[str] = []
        rows = _rows_until(path, first_step) if first_step and path.exists() else []
        if rows:
            self._columns = list(rows[0])
            self._write_anew(rows)
        elif first_step and path.exists() and _rows_until(path, sys.maxsize):
            path.unlink()  # it has only steps that the run makes again
        else:
            set_aside(path)

    def append(self, step: int, values: Mapping[str, float]) -> None:
        """Append a row.

        Args:
            step: Number of the step.
            values: Numbers by name of the column.

        Raises:
            OSError: If the file cannot be written. Nothing of the row is left in the file.
        """
        row = {"step": step, **values}
        new = [name for name in row if name not in self._columns]
        if new:
            rows = _rows_until(self._path, step) if self._path.exists() else []
            if not rows:
                set_aside(self._path)
            self._columns += new
            self._write_anew([*rows, _cells(row)])
            return
        append_whole(self._path, _lines(self._columns, [_cells(row)]).encode())

    def _write_anew(self, rows: list[dict[str, str]]) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with whole_file(self._path) as partial:
            header = _lines(self._columns, [dict(zip(self._columns, self._columns, strict=True))])
            text = header + _lines(self._columns, rows)
            partial.write_text(text, encoding="utf-8", newline="\n")


def _cells(row: Mapping[str, float]) -> dict[str, str]:
    """Return the texts of a row: 1 and 0 for flags, and numbers that ``float`` reads back."""
    return {
        name: str(int(value)) if isinstance(value, (bool, int)) else repr(float(value))
        for name, value in row.items()
    }


def _lines(columns: list[str], rows: list[dict[str, str]]) -> str:
    text = io.StringIO()
    # By itself, `csv` does not quote "\r" here, and takes it for the end of a line when it reads.
    quoting: Literal[0, 1] = (
        csv.QUOTE_ALL if any("\r" in column for column in columns) else csv.QUOTE_MINIMAL
    )
    csv.DictWriter(text, columns, restval="", lineterminator="\n", quoting=quoting).writerows(rows)
    return text.getvalue()


def _rows_until(path: Path, last_step: int) -> list[dict[str, str]]:
    """Return the whole rows of a file up to a step."""
    # Only "\n" ends a line here. `splitlines` and text mode take others for ends, too, which a
    # quoted name may have.
    lines = io.StringIO(path.read_bytes().decode("utf-8-sig"), newline="\n")
    whole = [line for line in lines if line.endswith("\n")]
    rows = []
    for row in csv.DictReader(whole):
        step = row.get("step") or ""
        is_whole = None not in row and None not in row.values()
        if is_whole and step.isdecimal() and int(step) <= last_step:
            rows.append(row)
    return rows
