"""Find, keep and delete what an earlier run has left in a run folder."""

import contextlib
import os
import re
import traceback
from pathlib import Path

from transformers import TrainingArguments

from mfwrap.checkpoints.folders import (
    ABANDONED,
    OWN_PARTIAL,
    being_replaced,
    checkpoints_of_run,
    remove_checkpoints,
    step_of_checkpoint,
    sync,
    whole_file,
)
from mfwrap.recipe.document import RecipeDocument
from mfwrap.records.rollbacks import ROLLBACKS_FILE
from mfwrap.trainer.rollback import SKIP_ROWS_FILE

RESULT = "result.json"
"""File with the metrics of a run, written when the run has finished."""

MODEL = "model"
"""Folder of the trained weights."""

AVERAGED_MODEL = "model_ema"
"""Folder of the averaged weights."""

EARLIER = "earlier_"
"""Prefix of the tracebacks of attempts before the one that has finished the run."""

_CHECKPOINT = re.compile(r"checkpoint-\d+")
_RECORD = re.compile(
    r"(anomalies|checkpoint_health|fingerprints|local_norms|metrics|progress|rank_clock|throughput"
    r"|training_state)(_rank\d+)?\.jsonl"
    rf"|({re.escape(RESULT)}|{re.escape(ROLLBACKS_FILE)}|{re.escape(SKIP_ROWS_FILE)}"
    r"|abnormal_global_norm\.json|run\.(html|json|png)"
    rf"|({EARLIER})?error_rank_\d+\.txt)({OWN_PARTIAL})?"
)
_EVENTS = "tensorboard/events.out.tfevents.*"
_MODELS = (MODEL, AVERAGED_MODEL)


def check_former_run(document: RecipeDocument, folder: Path) -> None:
    """Refuse to start in a run folder that has checkpoints.

    A later resume would take the newest checkpoint, no matter which run wrote it.

    Args:
        document: Recipe; supplies the place for the error.
        folder: Folder of the run that is about to start.

    Raises:
        RecipeError: If the folder has a checkpoint.
    """
    found = checkpoints(folder)
    if found:
        says = (
            f"must be a folder without checkpoints, got {folder} with {found[-1].name}; resume "
            "that run with --resume, delete it with --overwrite, or choose another folder with "
            "--set training.output_dir=..."
        )
        raise document.error(("training", "output_dir"), says)


def begin_anew(folder: Path, arguments: TrainingArguments, *, overwrite: bool) -> list[str]:
    """Delete the records of an earlier run, so that they do not mix with those of this run.

    Every process must call this function before any process writes to the folder. The main process
    of each node deletes the files. Files that do not come from a run are kept.

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


def _remove(folder: Path, *, overwrite: bool) -> list[str]:
    removed: list[str] = []
    result = folder / RESULT
    if result.exists():
        # Remove it first: if the process is killed before the end, `--resume=auto` must not report
        # a finished run whose files are gone.
        result.unlink()
        sync(folder)
        removed.append(RESULT)
    if overwrite:
        folders = [path for path in folder.glob(f"{ABANDONED}*") if path.is_dir()]
        folders += [path for name in _MODELS if (path := folder / name).is_dir()]
        folders += checkpoints(folder)
        # Remove the newest checkpoint last, and the records after it: if the process is killed
        # before that, the earlier run can still be resumed without repeating a step.
        remove_checkpoints(folders, folder)
        removed += [path.name for path in folders]
    records = _matching(folder, _RECORD)
    files = [*(path for path in records if path.is_file()), *folder.glob(_EVENTS)]
    for path in files:
        path.unlink(missing_ok=True)
    removed += [path.relative_to(folder).as_posix() for path in files]
    return sorted(removed)


def write_traceback(folder: Path, error: BaseException) -> Path | None:
    """Write the traceback of a run's error to its folder, and return the file.

    If the folder cannot be written, print the traceback and return ``None``.

    Args:
        folder: Run folder, which may be missing.
        error: The error.
    """
    file = folder / f"error_rank_{os.environ.get('RANK', '0')}.txt"
    try:
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
    for path in folder.glob("error_rank_*.txt"):
        # If nodes share the disk, another node may have renamed the file just now.
        with contextlib.suppress(FileNotFoundError):
            path.replace(path.with_name(EARLIER + path.name))


def checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints in a run folder, in the order of their steps.

    If a process was killed while it replaced a checkpoint, the checkpoint may be in its staging
    folder. Such checkpoints are included.
    """
    replaced = [each for each in being_replaced(folder) if _CHECKPOINT.fullmatch(each.name)]
    return sorted({*checkpoints_of_run(folder), *replaced}, key=step_of_checkpoint)


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    return [path for path in folder.glob("*") if pattern.fullmatch(path.name)]
