"""Programs that each rank runs to save the state of an attached loop."""

import errno
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from accelerate.utils import ProjectConfiguration

from mfwrap.accelerate import background
from mfwrap.checkpoints.manifest import MANIFEST
from support.attached_runs import AttachedRun
from support.training_state import assert_same_state

__all__ = ["save_in_one_folder", "save_in_the_background", "save_with_limit"]


def save_in_the_background(_rank: int, folder: str) -> tuple[bool, bool, str]:
    """Save and go on, then save to a full disk.

    Returns:
        Whether the first checkpoint is there after waiting, whether the second one is not, and the
        error of the second one. Loading the first one restores the state at the save.
    """
    run = AttachedRun(async_save=True)
    run.train(0, 2)
    saved = run.state()
    run.accelerator.save_state(folder + "/a")
    run.train(2, 4)
    run.step.wait_for_checkpoint()
    has_checkpoint = Path(folder, "a", MANIFEST).is_file()
    run.accelerator.load_state(folder + "/a")
    assert_same_state(saved, run.state())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background, "save_object", _full)
        run.accelerator.save_state(folder + "/b")
        run.train(2, 3)
        with pytest.raises(OSError, match="No space left") as caught:
            run.accelerator.end_training()
    return has_checkpoint, not Path(folder, "b").exists(), str(caught.value)


def _full(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def save_in_one_folder(_rank: int, folder: str) -> list[str]:
    """Save twice into one folder, and load; return the names of the files."""
    run = AttachedRun()
    for update in range(2):
        run.train(update, update + 1)
        run.accelerator.save_state(folder)
        saved = run.state()
    run.train(2, 3)
    run.accelerator.load_state(folder)
    assert_same_state(saved, run.state())
    return sorted(path.name for path in Path(folder).iterdir())


def save_with_limit(_rank: int, folder: str) -> tuple[list[str], list[str]]:
    """Save twice and keep one checkpoint; return what remains, and what this rank has deleted.

    Each rank replaces the file of its own records, which does not count.
    """
    settings = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=1)
    run = AttachedRun(project_config=settings)
    deleted: list[str] = []
    is_saving = True

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if is_saving and event in ("shutil.rmtree", "os.remove", "os.rmdir"):
            deleted.append(str(arguments[0]))

    # A hook cannot be removed, so it ends with `is_saving`.
    sys.addaudithook(note)
    for _ in range(2):
        run.accelerator.save_state()
    is_saving = False
    run.accelerator.wait_for_everyone()
    remaining = [str(path.relative_to(folder)) for path in Path(folder).glob("*/*")]
    return remaining, [
        path for path in deleted if path.startswith(folder) and "mfwrap_records_" not in path
    ]
