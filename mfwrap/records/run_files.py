"""Commit the records of a run together with a checkpoint, and truncate them on resuming.

A checkpoint holds the lengths of the run's record files, one list per rank. The files are synced to
disk before the checkpoint gets its name, so a checkpoint that exists has all of its records. When a
training resumes, each file is truncated to its length in the list. So after a crash at any moment,
the files hold each step up to the checkpoint once, and the resumed training writes the rest.
"""

import contextlib
import json
import os
import re
import warnings
import weakref
import zlib
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple, final

from mfwrap.arguments import callers_stacklevel
from mfwrap.checkpoints.ownership import OwnedFolders
from mfwrap.checkpoints.whole import check_writable, sync, whole_file
from mfwrap.checkpoints.written_files import drop_unused_list, list_own
from mfwrap.collectives import num_ranks, this_rank
from mfwrap.records.json_lines import JsonLines, step_of
from mfwrap.records.own_names import begin_folder, check_own, refuse_others

_LIST = "mfwrap_records_{}.json"
_LIST_NAME = re.compile(r"mfwrap_records_(\d+)\.json")
_FORMAT_VERSION = 1
_LENGTH_OF_END = 4096

_OWNED: ContextVar[OwnedFolders | None] = ContextVar("owned", default=None)
"""Folders of the loop that opens files; each thread may run a loop of its own."""


class _Committed(NamedTuple):
    """A record file as it was when a checkpoint was written; all 0 if there was no such file."""

    num_bytes: int
    crc32_of_end: int
    """CRC-32 of the last 4096 bytes, by which a file of another run is recognized."""


@final
class RunFiles:
    """Open the record files of this process, commit them with checkpoints, and truncate them."""

    def __init__(self) -> None:
        self._open: weakref.WeakSet[JsonLines] = weakref.WeakSet()
        self._begun: set[Path] = set()
        """Folders whose list this process has begun."""

        self.begin()

    def begin(self) -> None:
        """Begin a training from the start: files that are opened from now on start empty."""
        self._checkpoint: Path | None = None
        self._committed: dict[Path, _Committed] = {}
        self._is_fork = False
        self._cut_at: dict[Path, int] = {}
        self.folders: dict[Path, None] = {}
        """Folders in which this training has opened files, in their order."""

    def open(self, path: Path, global_step: int) -> JsonLines:
        """Open a record file at the start of a training, without records of other trainings.

        - In a training from the start, a file with records is renamed to ``<name>.1`` (``.2``, ...
          if that exists), with a warning: it belongs to an earlier run.
        - In a resumed training, records that were written after the checkpoint are cut off. If the
          checkpoint does not list the file, records of later steps are removed.

        Args:
            path: The file. Its folder is created.
            global_step: Steps finished before this training; 0 for a training from the start.

        Raises:
            BlockingIOError: If another program owns the folder.
            FileExistsError: If there is a file of this name that no run of mfwrap has written.
            OSError: If files cannot be written to the folder.
        """
        path = path.absolute()
        self._claim(path)
        committed = self._committed.pop(path, None)
        if self._cut_at.get(path) != global_step:
            if committed is not None:
                self._cut(path, committed, global_step)
            elif self._is_fork or not global_step:
                set_aside(path)
            else:
                _remove_later_records(path, global_step)
        list_own(path)
        lines = JsonLines(path)
        self._open.add(lines)
        self.folders[path.parent] = None
        return lines

    def has_open(self, path: Path) -> bool:
        """Return whether a monitor of this training writes a file."""
        path = path.absolute()
        return path.parent in self.folders and any(one.path == path for one in self._open)

    def begin_parts(self, folder: Path, global_step: int) -> bool:
        """Begin a folder of records in a run folder, whose owner removes records by their steps.

        Args:
            folder: The folder, which may be missing.
            global_step: Steps finished before this training; 0 for a training from the start.

        Returns:
            Whether what is in the folder belongs to an earlier run.

        Raises:
            BlockingIOError: If another program owns the run folder.
            FileExistsError: If there is a folder of this name that no run of mfwrap has written.
            OSError: If files cannot be written to the run folder.
        """
        folder = folder.absolute()
        self._claim(folder)
        list_own(folder)
        self.folders[folder.parent] = None
        return self._is_fork or not global_step

    def _claim(self, path: Path) -> None:
        """Own the folder of a record, and refuse a record that no run of mfwrap has written."""
        owned = _OWNED.get()
        if owned is not None:
            owned.own(path.parent)
        check_writable(path.parent)
        if path not in self._committed:
            try:
                check_own([path])
            except FileExistsError:
                if path.parent in self._begun:  # for a file that was opened before
                    drop_unused_list(path.parent)
                raise
        if begin_folder(path.parent):
            self._begun.add(path.parent)

    def save(self, checkpoint: Path, run_folder: Path | None = None) -> None:
        """Sync the open files to disk, and write their lengths into a checkpoint.

        Writes nothing if no file is open.

        Args:
            checkpoint: Folder of the checkpoint; created if it is missing.
            run_folder: Folder that `checkpoint` will be in when it is complete; ``None`` if it is
                there already.
        """
        committed = dict(self._committed)
        for path in sorted({lines.path for lines in self._open}):
            committed[path] = _Committed(0, 0)
            if path.exists():
                sync(path)
                committed[path] = _Committed(size := path.stat().st_size, _crc_of_end(path, size))
        written = checkpoint / _LIST.format(this_rank())
        if not committed:
            written.unlink(missing_ok=True)  # of an earlier save in the same folder
            return
        for folder in sorted({path.parent for path in committed if path.exists()}):
            sync(folder)
        base = (checkpoint.parent if run_folder is None else run_folder).absolute()
        content = {
            "format_version": _FORMAT_VERSION,
            "num_ranks": num_ranks(),
            "files": {
                os.path.relpath(path, base): each._asdict() for path, each in committed.items()
            },
        }
        checkpoint.mkdir(parents=True, exist_ok=True)
        with whole_file(written) as partial:
            partial.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

    def resume(
        self, checkpoint: Path, *, run_folder: Path | None = None, global_step: int = 0
    ) -> None:
        """Resume from a checkpoint: truncate the files that it lists, at the latest in `open`.

        Args:
            checkpoint: Folder of the checkpoint.
            run_folder: Folder of the resumed run. If `checkpoint` is in it, all listed files in the
                folder are truncated at once. Otherwise the training is a new branch: files of the
                first run stay as they are, and files that are opened from now on start empty.
                ``None``: each file is truncated when it is opened.
            global_step: Steps finished before the checkpoint. Only needed with `run_folder`.

        Raises:
            ValueError: If a list of lengths is damaged.
        """
        self.begin()
        base = checkpoint.absolute().parent
        if run_folder is not None:
            self._is_fork = base.resolve() != run_folder.resolve()
            base = base if self._is_fork else run_folder.absolute()
        self._checkpoint = checkpoint
        self._committed = {
            Path(os.path.normpath(base / name)): committed
            for path in _own_lists(checkpoint)
            for name, committed in _read(path)[1].items()
        }
        if run_folder is None:
            return
        inside = sorted(path for path in self._committed if path.is_relative_to(base))
        for path in inside:
            if self._is_fork:
                del self._committed[path]
            else:
                self._cut(path, self._committed[path], global_step)

    def _cut(self, path: Path, committed: _Committed, global_step: int) -> None:
        if path.is_symlink():
            refuse_others([path])
        self._cut_at[path] = global_step
        size = path.stat().st_size if path.exists() else 0
        num_bytes = committed.num_bytes
        if size < num_bytes or _crc_of_end(path, num_bytes) != committed.crc32_of_end:
            warnings.warn(
                f"{path} has changed since {self._checkpoint} was written: expected the same first "
                f"{num_bytes} bytes, got other or fewer bytes (file size {size}); records may be "
                "missing",
                stacklevel=callers_stacklevel(),
            )
            if global_step:
                _remove_later_records(path, global_step)
            else:
                set_aside(path)
        elif num_bytes == 0:
            path.unlink(missing_ok=True)
        elif size > num_bytes:
            os.truncate(path, num_bytes)


_OF_LOOPS = RunFiles()
"""Files of this process that no Trainer has opened."""

_RUN_FILES: ContextVar[RunFiles] = ContextVar("run_files", default=_OF_LOOPS)
"""Files of the present training; each thread may run a Trainer of its own."""


def open_records(path: Path, global_step: int) -> JsonLines:
    """Open a record file of the present training; see `RunFiles.open`."""
    return _RUN_FILES.get().open(path, global_step)


def is_open(path: Path) -> bool:
    """Return whether a monitor of this training writes a file; false in a loop."""
    files = _RUN_FILES.get()
    return files is not _OF_LOOPS and files.has_open(path)


def begin_parts(folder: Path, global_step: int) -> bool:
    """Begin a folder of records of the present training; see `RunFiles.begin_parts`."""
    return _RUN_FILES.get().begin_parts(folder, global_step)


def record_folders() -> list[Path]:
    """Return the folders in which this training has opened record files, in their order.

    None of them is returned outside of `records_of_training`, where loops share their files.
    """
    files = _RUN_FILES.get()
    return [] if files is _OF_LOOPS else list(files.folders)


def save_records(checkpoint: Path, run_folder: Path | None = None) -> None:
    """Commit the record files of this process with a checkpoint, in a loop of your own.

    Syncs the files that monitors have open to disk, and writes their lengths into
    ``mfwrap_records_<rank>.json`` in the checkpoint. Writes nothing if no file is open. Call it on
    every rank, after `MonitorCallback.on_pre_save` of the monitors. `MFTrainer` does the same for
    you, and so does ``accelerator.save_state`` if the accelerator was passed to `attach` or to a
    cell.

    Args:
        checkpoint: Folder of the checkpoint; created if it is missing.
        run_folder: Folder that `checkpoint` will be in when it is complete; ``None`` if it is there
            already.

    Raises:
        OSError: If a file cannot be synced or written.

    Example:
        >>> import torch
        >>> from transformers import TrainerControl, TrainerState
        >>> from mfwrap import MFTrainOneStepCell, WithLossCell
        >>> from mfwrap.callbacks import MetricsRecorder
        >>> network = WithLossCell(torch.nn.Linear(2, 1), torch.nn.MSELoss())
        >>> cell = MFTrainOneStepCell(network, torch.optim.SGD(network.parameters(), lr=0.1))
        >>> recorder, state, control = MetricsRecorder("run"), TrainerState(), TrainerControl()
        >>> recorder.on_train_begin(None, state, control)
        >>> for state.global_step in (1, 2):
        ...     output = cell(torch.ones(4, 2), torch.ones(4, 1))
        ...     recorder.on_step_end(None, state, control, step_report=cell.last_report)
        >>> recorder.on_pre_save(None, state, control)
        >>> save_records(Path("run/step_2"))  # and save network, optimizer and cell there
        >>> recorder.on_train_end(None, state, control)
    """
    _RUN_FILES.get().save(checkpoint, run_folder)


def resume_records(checkpoint: Path) -> None:
    """Continue the record files of a checkpoint, in a loop of your own.

    When a monitor opens a file, at the latest at ``on_train_begin``, the records that were written
    after the checkpoint are cut off. If a file has lost records since then, a warning names it.
    Call this function on every rank, before ``on_train_begin`` of the monitors. `MFTrainer` does
    the same for you, and so does ``accelerator.load_state`` if the accelerator was passed to
    `attach` or to a cell.

    Args:
        checkpoint: Folder that was given to `save_records`.

    Raises:
        ValueError: If a list of lengths is damaged.
    """
    _RUN_FILES.get().resume(checkpoint)


@contextlib.contextmanager
def owning_record_folders(owned: OwnedFolders) -> Iterator[None]:
    """Own each folder in which files are opened within the block, until `owned` is closed."""
    before = _OWNED.set(owned)
    try:
        yield
    finally:
        _OWNED.reset(before)


@contextlib.contextmanager
def records_of_training() -> Iterator[None]:
    """Begin a training within the block, with record files of its own.

    Its checkpoints list no file that another loop of the process has open. Within the block, the
    training owns the folders in which it opens files.
    """
    before = _RUN_FILES.set(RunFiles())
    try:
        with contextlib.closing(OwnedFolders()) as owned, owning_record_folders(owned):
            yield
    finally:
        _RUN_FILES.reset(before)


def resume_run(checkpoint: Path, run_folder: Path, global_step: int) -> None:
    """Resume the records of a Trainer's run; see `RunFiles.resume`."""
    _RUN_FILES.get().resume(checkpoint, run_folder=run_folder, global_step=global_step)


def _crc_of_end(path: Path, num_bytes: int) -> int:
    """Return the CRC-32 of the last 4096 of a file's first `num_bytes` bytes."""
    if num_bytes == 0:
        return 0
    start = max(num_bytes - _LENGTH_OF_END, 0)
    with path.open("rb") as file:
        file.seek(start)
        return zlib.crc32(file.read(num_bytes - start))


def _own_lists(checkpoint: Path) -> Iterator[Path]:
    """Yield the lists that this rank applies: its own, and those of ranks that this run lacks."""
    lists = {
        int(match[1]): path
        for path in sorted(checkpoint.glob("*"))
        if (match := _LIST_NAME.fullmatch(path.name))
    }
    if not lists:
        return
    # If more ranks have written to the folder earlier, their lists are still there. The last save
    # has replaced the list of the lowest rank, which says how many ranks took part in that save.
    written_by, _ = _read(lists[min(lists)])
    for rank, path in lists.items():
        if rank < written_by and rank % num_ranks() == this_rank():
            yield path


def _read(path: Path) -> tuple[int, dict[str, _Committed]]:
    """Return the number of ranks, and the committed files by name."""
    try:
        content: Any = json.loads(path.read_text(encoding="utf-8"))
        files = {name: _Committed(**each) for name, each in content["files"].items()}
        num_written_by, version = int(content["num_ranks"]), content["format_version"]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        msg = (
            f"{path} is damaged; delete this file to resume without it: records of later steps are "
            "then recognized by their step numbers"
        )
        raise ValueError(msg) from error
    if version != _FORMAT_VERSION:
        msg = f"{path}: expected format_version {_FORMAT_VERSION}, got {version!r}"
        raise ValueError(msg)
    return num_written_by, files


def set_aside(path: Path) -> None:
    """Rename a file that has records to ``<name>.1`` (``.2``, ... if that exists), and warn."""
    if not path.exists() or path.stat().st_size == 0:
        return
    number = 1
    while (aside := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(aside)
    warnings.warn(
        # The same words for each file: Python then shows them once for a folder.
        f"{path.parent} has records of an earlier run; the names of its files now end in .{number}",
        stacklevel=callers_stacklevel(),
    )


def _remove_later_records(path: Path, global_step: int) -> None:
    """Remove the records of steps after `global_step`; keep lines that are not records."""
    if not path.exists():
        return
    lines = path.read_bytes().splitlines(keepends=True)
    kept = [line for line in lines if step_of(line) <= global_step]
    if not kept:
        path.unlink()
    elif len(kept) < len(lines):
        with whole_file(path) as partial:
            partial.write_bytes(b"".join(kept))
