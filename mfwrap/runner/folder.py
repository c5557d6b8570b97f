"""Find, keep and delete what an earlier run has left in a run folder."""

import contextlib
import os
import re
import traceback
from pathlib import Path

from transformers import TrainingArguments

from mfwrap.checkpoints.run_folders import (
    ABANDONED,
    checkpoints_of_run,
    remove_checkpoints,
    step_of_checkpoint,
)
from mfwrap.checkpoints.whole import being_replaced, sync, whole_file
from mfwrap.checkpoints.written_files import list_own, rewrite_list
from mfwrap.records.own_names import (
    AVERAGE_SNAPSHOTS,
    CHECKPOINT,
    COMPLETIONS,
    EARLIER,
    RECORD,
    base_name,
    begin_folder,
    check_own,
    known_names,
    own_names,
)
from mfwrap.records.row_losses import FOLDER as ROW_LOSSES
from mfwrap.runner.document import RecipeDocument

RESULT = "result.json"
"""File with the metrics of a run, written when the run has finished."""

MODEL = "model"
"""Folder of the trained weights."""

AVERAGED_MODEL = "model_ema"
"""Folder of the averaged weights."""

_EVENTS = "tensorboard"
"""Folder of TensorBoard's event files."""

_MODELS = (MODEL, AVERAGED_MODEL, AVERAGE_SNAPSHOTS)
_OF_OTHERS = re.compile(rf"run\.(html|png)|({EARLIER})?error_rank_.*")
"""Files that a training does not write. Its failed starts leave tracebacks."""


def check_others_files(document: RecipeDocument, folder: Path) -> None:
    """Refuse a run folder in which the run would replace files that no run of mfwrap has written.

    Args:
        document: Recipe; supplies the place for the error.
        folder: Folder of the run that is about to start or to be resumed.

    Raises:
        RecipeError: If there are such files. The message names them.
    """
    others = sorted(
        name
        for name in known_names(folder) - own_names(folder)
        if name not in {_EVENTS, COMPLETIONS}
        and not _OF_OTHERS.fullmatch(name)
        and not (CHECKPOINT.search(name) and (folder / name).is_dir())
    )
    if others:
        says = (
            f"must be a folder in which the run replaces no other files, got {folder} with "
            f"{', '.join(others)}; choose another folder with --set training.output_dir=..., or "
            "move these files away"
        )
        raise document.error(("training", "output_dir"), says)


def check_former_run(document: RecipeDocument, folder: Path, *, overwrite: bool) -> None:
    """Refuse to start in a run folder that has checkpoints or the result of a finished run.

    A later resume would take the newest checkpoint, no matter which run wrote it.

    Args:
        document: Recipe; supplies the place for the error.
        folder: Folder of the run that is about to start.
        overwrite: Whether to accept what runs of mfwrap have written: it will be deleted.

    Raises:
        RecipeError: If the folder has a checkpoint or a result.
    """
    found = checkpoints(folder)
    own = own_names(folder)
    if overwrite:
        others = [path.name for path in found if path.name not in own]
        if others:
            says = (
                f"must be a folder whose checkpoints mfwrap has written, got {folder} with "
                f"{others[-1]}; choose another folder with --set training.output_dir=..."
            )
            raise document.error(("training", "output_dir"), says)
        return
    if found:
        says = (
            f"must be a folder without checkpoints, got {folder} with {found[-1].name}; resume "
            "that run with --resume, delete it with --overwrite, or choose another folder with "
            "--set training.output_dir=..."
        )
        raise document.error(("training", "output_dir"), says)
    if RESULT in own:
        says = (
            f"must be a folder without a finished run, got {folder} with {RESULT}; delete that run "
            "with --overwrite, or choose another folder with --set training.output_dir=..."
        )
        raise document.error(("training", "output_dir"), says)


def begin_anew(folder: Path, arguments: TrainingArguments, *, overwrite: bool) -> list[str]:
    """Delete the records of an earlier run, so that they do not mix with those of this run.

    Every process must call this function before any process writes to the folder. The main process
    of each node deletes the files. Files that no run of mfwrap has written are kept.

    Args:
        folder: Run folder.
        arguments: Arguments of the training.
        overwrite: Whether to delete checkpoints and models as well.

    Returns:
        Names of the files and folders that the main process has deleted; an empty list in all other
        processes.
    """
    removed: list[str] = []
    with arguments.main_process_first(local=False):
        if arguments.process_index == 0:
            removed = _remove(folder, overwrite=overwrite)
    # Delete the files of the other nodes, too, which may have separate disks. On a shared disk the
    # main process has deleted the files already.
    with arguments.main_process_first(), contextlib.suppress(FileNotFoundError):
        if arguments.local_process_index == 0 and arguments.process_index != 0:
            _remove(folder, overwrite=overwrite)
    return removed


def claim(folder: Path, arguments: TrainingArguments) -> None:
    """Begin the list of a run that is resumed, if its folder has none; on all ranks."""
    with arguments.main_process_first():
        if arguments.local_process_index == 0:
            begin_folder(folder)


def is_free_of_completions(folder: Path) -> bool:
    """Return whether a run folder has no files where TRL writes answers and their rewards.

    Call it before the Trainer is built, which makes this folder.
    """
    return not any((folder / COMPLETIONS).glob("*"))


def list_completions(folder: Path, *, was_free: bool) -> None:
    """Note that the run has written the folder of answers and rewards, if TRL has made one.

    Call it in the main process.

    Args:
        folder: Run folder.
        was_free: What `is_free_of_completions` has returned. Files that were there may be somebody
            else's, and are kept.
    """
    if was_free and (path := folder / COMPLETIONS).is_dir():
        list_own(path)


def _remove(folder: Path, *, overwrite: bool) -> list[str]:
    removed: list[str] = []
    own = own_names(folder)
    # In a folder without a list, the facts of its run tell what is mfwrap's. Note the names before
    # the facts are deleted.
    begin_folder(folder)
    result = folder / RESULT
    if RESULT in own:
        # Remove it first: if the process is killed before the end, `--resume=auto` must not report
        # a finished run whose files are gone.
        result.unlink()
        sync(folder)
        removed.append(RESULT)
    if overwrite:
        names = [*sorted(name for name in own if name.startswith(ABANDONED)), *_MODELS]
        folders = [path for name in names if name in own and (path := folder / name).is_dir()]
        folders += [path for path in checkpoints(folder) if path.name in own]
        # Remove the newest checkpoint last, and the records after it: if the process is killed
        # before that, the earlier run can still be resumed without repeating a step.
        remove_checkpoints(folders, folder)
        removed += [path.name for path in folders]
    files = [path for name in own if RECORD.fullmatch(name) and (path := folder / name).is_file()]
    if _EVENTS in own:
        files += (folder / _EVENTS).glob("events.out.tfevents.*")
    if ROW_LOSSES in own:
        files += (folder / ROW_LOSSES).glob("*.parquet")
    if COMPLETIONS in own:
        files += (folder / COMPLETIONS).glob("completions_[0-9]*.parquet")
    for path in files:
        path.unlink(missing_ok=True)
    removed += [path.relative_to(folder).as_posix() for path in files]
    rewrite_list(folder, {base_name(name) for name in own_names(folder)})
    return sorted(removed)


def write_traceback(folder: Path, error: BaseException) -> Path | None:
    """Write the traceback of a run's error to its folder, and return the file.

    If the folder cannot be written, or has a file of this name that is not mfwrap's, print the
    traceback and return ``None``.

    Args:
        folder: Run folder, which may be missing.
        error: The error.
    """
    file = folder / f"error_rank_{os.environ.get('RANK', '0')}.txt"
    try:
        check_own([file])
        begin_folder(folder)
        with whole_file(file) as partial:
            partial.write_text("".join(traceback.format_exception(error)), encoding="utf-8")
    except OSError:  # the run may have failed because the disk is full
        traceback.print_exception(error)
        return None
    return file


def set_aside_tracebacks(folder: Path) -> None:
    """Rename the tracebacks of earlier attempts, so that a finished run does not look failed.

    Args:
        folder: Folder of a run that has finished. ``error_rank_0.txt`` becomes
            ``earlier_error_rank_0.txt``, which is replaced if it exists.
    """
    own = own_names(folder)
    for path in [each for each in folder.glob("error_rank_*.txt") if each.name in own]:
        # If nodes share the disk, another node may have renamed the file just now.
        with contextlib.suppress(FileNotFoundError):
            path.replace(path.with_name(EARLIER + path.name))


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a run folder, in the order of their steps.

    If a process was killed while it replaced a checkpoint, the checkpoint may be in its staging
    folder. Such checkpoints are included.
    """
    replaced = [each for each in being_replaced(folder) if CHECKPOINT.fullmatch(each.name)]
    return sorted({*checkpoints_of_run(folder), *replaced}, key=step_of_checkpoint)
