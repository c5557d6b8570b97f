"""Find, set aside and remove the checkpoints of a run, and remove what killed runs have left."""

import contextlib
import logging
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

from mfwrap.checkpoints.locks import PARTIAL
from mfwrap.checkpoints.whole import (
    OWN_PARTIAL,
    REMOVED,
    being_replaced,
    complete_move,
    is_own_staging,
    staging_folder,
    sync,
)
from mfwrap.checkpoints.written_files import drop_listed

ABANDONED = "_abandoned-"
"""Prefix of checkpoints that a run has set aside: it resumed from an older one, or began anew. The
Trainer does not push what begins with an underscore to the hub."""

_logger = logging.getLogger("mfwrap")

_CHECKPOINT = re.compile(r"checkpoint-(\d+)")
_STAGING = re.compile(
    rf"_(({ABANDONED})?checkpoint-\d+(\.\d+)?|model|model_ema){re.escape(PARTIAL)}"
)
"""Staging folders of a run."""

_LEFT_FILE = re.compile(rf"(?!run\.(html|png)\.).+{OWN_PARTIAL}")


def checkpoints_of_run(run_folder: Path) -> list[Path]:
    """Return the folders ``checkpoint-<step>`` in a run folder, in the order of their steps.

    Other folders, such as ``checkpoint-backup`` or ``checkpoint-4-copy``, are a user's own.
    """
    found = [path for path in run_folder.glob("checkpoint-*") if _CHECKPOINT.fullmatch(path.name)]
    return sorted((path for path in found if path.is_dir()), key=step_of_checkpoint)


def step_of_checkpoint(folder: Path) -> int:
    """Return the step in the name of a folder ``checkpoint-<step>``."""
    return int(folder.name.rpartition("-")[2])


def set_aside_later_checkpoints(folders: Iterable[Path], step: int) -> list[Path]:
    """Rename the checkpoints of later steps.

    Call it when a run resumes from an older checkpoint, or begins anew, before the run removes
    records of later steps. If the run is killed before it saves again, the next resume then finds
    the checkpoint of `step` as the newest one. Without the renaming, it would continue from a later
    checkpoint, whose records have been removed.

    Args:
        folders: Folders ``checkpoint-<step>`` of a run, in the order of their steps.
        step: Step from which the run goes on; 0 for a run from the start.

    Returns:
        The new folders: ``_abandoned-checkpoint-<step>``; if that name is taken, with ``.2``,
        ``.3``, ... at the end.
    """
    later = [path for path in folders if step_of_checkpoint(path) > step]
    aside = []
    # Rename the latest checkpoint first. If the process is killed in between, the newest checkpoint
    # that keeps its name is then one of the abandoned run, whose records still exist.
    for one in reversed(later):
        final = first = one.with_name(f"{ABANDONED}{one.name}")
        number = 1
        while os.path.lexists(final):
            number += 1
            final = first.with_name(f"{first.name}.{number}")
        # If nodes share the disk, another node may have renamed the folder just now.
        with contextlib.suppress(FileNotFoundError):
            one.rename(final)
            aside.append(final)
    if aside:
        sync(aside[0].parent)
    return aside


def remove_checkpoints(folders: Iterable[Path], run_folder: Path) -> None:
    """Delete checkpoints.

    Each checkpoint is renamed before it is deleted, so that a half-deleted checkpoint is never
    mistaken for an intact one. A training does not end because a checkpoint cannot be deleted, for
    example if its user has protected it: it stays, with a warning in the log.

    Args:
        folders: Folders of the checkpoints.
        run_folder: Folder on the same disk, for the renamed folders.
    """
    renamed = []
    for folder in folders:
        staging = staging_folder(run_folder / folder.name)
        if os.path.lexists(staging) and not is_own_staging(staging):
            continue
        shutil.rmtree(staging, ignore_errors=True)
        try:
            (staging / REMOVED).mkdir(parents=True)
            folder.rename(staging / REMOVED / folder.name)
        except OSError as error:
            _logger.warning("cannot delete %s: %s", folder, error.strerror)
        else:
            drop_listed(folder)
        renamed.append(staging)
    for staging in renamed:
        shutil.rmtree(staging, ignore_errors=True)


def remove_leftovers(run_folder: Path) -> None:
    """Delete what killed processes have left of a run: half-written files and folders.

    Call it only if this program owns the folder. The temporary files of the page and the picture of
    the run stay, because other programs write them.
    """
    for folder in being_replaced(run_folder):
        complete_move(folder)
    for path in run_folder.glob(f"*{PARTIAL}"):
        # If nodes share the disk, another node may have deleted the file just now.
        with contextlib.suppress(FileNotFoundError):
            if path.is_symlink():
                continue
            if _STAGING.fullmatch(path.name) and is_own_staging(path):
                shutil.rmtree(path, ignore_errors=True)
            elif _LEFT_FILE.fullmatch(path.name) and path.is_file():
                path.unlink()
