"""Programs that each rank runs to save the state of an attached loop."""

from pathlib import Path

from support.attached_runs import AttachedRun
from support.training_state import assert_same_state

__all__ = ["save_in_one_folder"]


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
