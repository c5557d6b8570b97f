"""The loss of every row that a training has seen, in the folder ``row_losses`` of the run.

The folder has Parquet files, each with the rows of one rank in some steps:
``steps_00000001_00000200_rank_0.parquet``. A file is written whole, so a process that is killed
loses the rows of the file that it would have written next. A file ends where a checkpoint is saved,
so a training that resumes removes the files of later steps and writes their rows again.

Columns: ``step`` (from 1), ``epoch`` and ``position`` (place of the row in the order of the data,
from 0, as in ``skip_rows``), ``index`` (of the row in the data set), ``loss`` (mean over the
targets of the row; null without a target), ``targets`` (their number), and ``source`` if the
training has the loss by source.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, final

import numpy as np

from mfwrap.checkpoints.whole import sync, whole_file
from mfwrap.collectives import num_ranks, this_rank
from mfwrap.records.run_files import begin_parts, set_aside

if TYPE_CHECKING:
    import pyarrow as pa

FOLDER = "row_losses"
"""Name of the folder in a run folder."""

BY_SOURCE = ("loss/", "tokens/")
"""Prefixes of the names of numbers by source in the log of a training."""

_NAME = re.compile(r"steps_(\d+)_(\d+)_rank_(\d+)\.parquet")

_TYPES = {
    "step": np.int32,
    "epoch": np.int32,
    "position": np.int64,
    "index": np.int64,
    "loss": np.float32,
    "targets": np.int32,
}


class _Part(NamedTuple):
    path: Path
    first_step: int
    last_step: int
    rank: int


def check_pyarrow(what: str) -> None:
    """Raise ImportError if pyarrow is not installed.

    Args:
        what: What needs it, for the message.
    """
    if find_spec("pyarrow") is None:
        msg = f"{what} needs pyarrow, which is not installed; pip install pyarrow"
        raise ImportError(msg)


@final
class RowLossFiles:
    """Write the losses of this rank's rows.

    Args:
        run_folder: Run folder.
    """

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder.absolute() / FOLDER

    def begin(self, global_step: int, *, sets_aside: bool) -> None:
        """Remove the rows of steps that a training is about to do.

        In a training from the start, a folder with files is renamed to ``row_losses.1``, with a
        warning: it belongs to an earlier run.

        Args:
            global_step: Steps finished before this training; 0 for a training from the start.
            sets_aside: Whether this process renames the folder; one on each disk must.

        Raises:
            BlockingIOError: If another program owns the run folder.
            FileExistsError: If there is a folder of this name that no run of mfwrap has written.
            OSError: If files cannot be written to the run folder.
        """
        are_earlier = begin_parts(self._folder, global_step)
        for part in list(_parts(self._folder)):
            if are_earlier:
                if sets_aside:
                    set_aside(self._folder)
                return
            if part.rank % num_ranks() == this_rank():
                _cut(part, global_step)

    def write(self, columns: Mapping[str, Sequence[Any] | np.ndarray[Any, Any]]) -> None:
        """Write rows to a new file, in the order of their steps.

        Args:
            columns: ``step``, ``epoch``, ``position``, ``index``, ``loss``, ``targets`` and perhaps
                ``source``; at least one row.

        Raises:
            OSError: If the file cannot be written.
        """
        import pyarrow as pa  # noqa: PLC0415  (an extra)

        arrays = {name: np.asarray(columns[name], kind) for name, kind in _TYPES.items()}
        table = {
            name: pa.array(values, mask=arrays["targets"] == 0 if name == "loss" else None)
            for name, values in arrays.items()
        }
        if "source" in columns:
            table["source"] = pa.array(columns["source"], pa.string())
        first, last = int(arrays["step"][0]), int(arrays["step"][-1])
        name = f"steps_{first:08}_{last:08}_rank_{this_rank()}.parquet"
        _write(self._folder / name, pa.table(table))


def read_row_losses(run_folder: Path) -> "pa.Table":
    """Return the losses of all rows of a run, from all ranks.

    Args:
        run_folder: Run folder.

    Raises:
        FileNotFoundError: If the run has written none.
        ImportError: If pyarrow is not installed.
        ValueError: If a file is damaged.
    """
    check_pyarrow("reading the losses of rows")
    import pyarrow as pa  # noqa: PLC0415  (an extra)
    import pyarrow.parquet as pq  # noqa: PLC0415  (an extra)

    parts = list(_parts(run_folder / FOLDER))
    if not parts:
        msg = (
            f"{run_folder} has no losses of rows: there is no Parquet file in its folder {FOLDER}; "
            "train with `row_losses`"
        )
        raise FileNotFoundError(msg)
    tables = []
    for part in parts:
        try:
            tables.append(pq.read_table(part.path))
        except (pa.ArrowInvalid, OSError) as error:
            msg = f"{part.path} is damaged: {str(error).splitlines()[0]}"
            raise ValueError(msg) from error
    return pa.concat_tables(tables, promote_options="default")


def _parts(folder: Path) -> Iterator[_Part]:
    """Yield the files of a folder in the order of their steps."""
    for path in sorted(folder.glob("*.parquet")):
        match = _NAME.fullmatch(path.name)
        if match is not None:
            yield _Part(path, int(match[1]), int(match[2]), int(match[3]))


def _cut(part: _Part, global_step: int) -> None:
    """Remove the rows of later steps from a file, or the file."""
    if part.last_step <= global_step:
        return
    if part.first_step <= global_step:
        # Only a checkpoint that a program has saved in its own way is not at the end of a file.
        import pyarrow.parquet as pq  # noqa: PLC0415  (an extra)

        table = pq.read_table(part.path)
        name = f"steps_{part.first_step:08}_{global_step:08}_rank_{part.rank}.parquet"
        kept = np.asarray(table["step"]) <= global_step
        _write(part.path.with_name(name), table.filter(kept))
    part.path.unlink()
    sync(part.path.parent)


def _write(path: Path, table: "pa.Table") -> None:
    import pyarrow.parquet as pq  # noqa: PLC0415  (an extra)

    with whole_file(path) as partial:
        pq.write_table(table, partial, compression="zstd")
