"""A run's folder: whether it holds another run, and what of it makes place for a new one."""

import contextlib
import re
import shutil
from pathlib import Path

from transformers import TrainingArguments

from mfwrap.checkpoints.folders import remove_checkpoints, staging_folder
from mfwrap.recipe.document import RecipeDocument

__all__ = ["begin_anew", "check_former_run"]

_CHECKPOINT = re.compile(r"checkpoint-\d+")
_RECORD = re.compile(
    r"(anomalies|checkpoint_health|local_norms|metrics|throughput|training_state)"
    r"(_rank\d+)?\.jsonl"
    r"|abnormal_global_norm\.json|error_rank_\d+\.txt|run\.(html|png)"
)
_EVENTS = "tensorboard/events.out.tfevents.*"
_MODELS = ("model", "model_ema")


def check_former_run(document: RecipeDocument, folder: Path) -> None:
    """Refuse a folder with checkpoints: a later resume would take the newest, of whichever run.

    Args:
        document: Of the recipe, for the error.
        folder: Of the run that is to begin.

    Raises:
        RecipeError: If it holds any.
    """
    found = sorted(_checkpoints(folder), key=lambda path: int(path.name.rpartition("-")[2]))
    if found:
        says = (
            f"must be a folder without checkpoints of another run, got {folder} with "
            f"{found[-1].name}; go on from it with --resume, or choose another folder with "
            "--set training.output_dir=..., or remove what that run has left with --overwrite"
        )
        raise document.error(("training", "output_dir"), says)


def begin_anew(folder: Path, arguments: TrainingArguments, *, overwrite: bool) -> list[str]:
    """Remove the records of a former run, that none of them is read as this one's.

    Every process calls it before it writes anything; the first one removes. Files with other names
    stay.

    Args:
        folder: Of the run.
        arguments: Of the training.
        overwrite: Whether checkpoints and models go, too.

    Returns:
        The names of what this process has removed.
    """
    removed: list[str] = []
    with arguments.main_process_first(local=False):
        if arguments.process_index == 0:
            removed = _remove(folder, overwrite=overwrite)
    # A node may have a disk of its own; where it has not, nothing is left to do.
    with arguments.main_process_first(), contextlib.suppress(FileNotFoundError):
        if arguments.local_process_index == 0 and arguments.process_index != 0:
            _remove(folder, overwrite=overwrite)
    return removed


def _remove(folder: Path, *, overwrite: bool) -> list[str]:
    records = _matching(folder, _RECORD)
    files = [*(path for path in records if path.is_file()), *folder.glob(_EVENTS)]
    for path in files:
        path.unlink(missing_ok=True)
    removed = [path.relative_to(folder).as_posix() for path in files]
    if overwrite:
        checkpoints = [path for path in _checkpoints(folder) if path.parent == folder]
        models = [path for name in _MODELS if (path := folder / name).is_dir()]
        remove_checkpoints([*checkpoints, *models], folder)
        # In it, a process that was killed may have left another.
        shutil.rmtree(staging_folder(folder), ignore_errors=True)
        removed += [path.name for path in (*checkpoints, *models)]
    return sorted(removed)


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, that which was being replaced included."""
    replaced = [one for one in staging_folder(folder).glob("replaced/*") if one.is_dir()]
    return [*(path for path in _matching(folder, _CHECKPOINT) if path.is_dir()), *replaced]


def _matching(folder: Path, pattern: re.Pattern[str]) -> list[Path]:
    return [path for path in folder.glob("*") if pattern.fullmatch(path.name)]
