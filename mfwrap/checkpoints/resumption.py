"""Find the checkpoint that a training comes back to after it was started again."""

import re
import warnings
from collections.abc import Sequence
from pathlib import Path

from mfwrap.arguments import callers_stacklevel
from mfwrap.checkpoints.manifest import Verified
from mfwrap.checkpoints.verification import Refusal, check_checkpoint, newest_verified
from mfwrap.checkpoints.whole import being_replaced, complete_move
from mfwrap.collectives import gather_objects, raising_together, this_rank

AUTO = "auto"
"""Value of ``resume`` that starts a run or resumes it from its newest intact checkpoint."""


def newest_checkpoint(run_folder: str | Path, prefix: str = "checkpoint-") -> Path | None:
    """Return the newest intact checkpoint in a folder; ``None`` if the folder has no checkpoints.

    With it, one command starts a training and continues it after a crash. Call it on all ranks:
    rank 0 looks and reads the checkpoint to verify it, and the other ranks get its answer. All
    ranks wait for rank 0.

    Args:
        run_folder: Folder of the checkpoints, which may be missing.
        prefix: Start of the checkpoints' names; the rest of a name is the number of a step.

    Returns:
        ``run_folder/<prefix><number>`` with the highest number whose checkpoint is intact.

    Raises:
        ValueError: On all ranks, if there are checkpoints but none of them is intact.

    Warns:
        UserWarning: On rank 0, if a newer checkpoint is damaged.
    """
    found = None
    with raising_together():
        if this_rank() == 0:
            found = find_checkpoint(Path(run_folder), prefix)
    return gather_objects(None if found is None else found[0])[0]


def find_checkpoint(
    run_folder: Path,
    prefix: str = "checkpoint-",
    refusal: Refusal | None = None,
    required: Sequence[str] = (),
) -> tuple[Path, Verified] | None:
    """Do the work of `newest_checkpoint` in this process.

    Args:
        run_folder: Folder of the checkpoints, which may be missing.
        prefix: Start of the checkpoints' names.
        refusal: Function that returns why the weights of a checkpoint cannot be used; ``None`` to
            accept any weights.
        required: Names of files that the checkpoint must have.
    """
    newest = newest_folder(run_folder, prefix)
    if newest is None:
        return None
    try:
        return newest, check_checkpoint(newest, refusal, required)
    except ValueError as error:
        older = newest_verified(run_folder, newest, refusal, required)
        if older is None:
            raise
        warnings.warn(f"{error}; resuming from {older[0]}", stacklevel=callers_stacklevel())
        return older


def newest_folder(run_folder: Path, prefix: str = "checkpoint-") -> Path | None:
    """Return the checkpoint folder with the highest number, unverified; ``None`` without one.

    A folder without files is not a checkpoint: a script may have made it before it saved.
    If a process was killed while it replaced a checkpoint, the replacement is completed first.
    """
    for folder in being_replaced(run_folder):
        complete_move(folder)
    pattern = re.compile(rf"{re.escape(prefix)}(\d+)")
    steps = {
        int(match[1]): path
        for path in run_folder.glob("*")
        if (match := pattern.fullmatch(path.name)) and _has_file(path)
    }
    return steps[max(steps)] if steps else None


def _has_file(folder: Path) -> bool:
    return any(path.is_file() for path in folder.rglob("*"))
