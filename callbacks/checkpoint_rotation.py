"""Which checkpoints of a run are kept."""

import shutil
from pathlib import Path

from mfwrap.callbacks.checkpoint_health import recorded_health

__all__ = ["PREFIX", "rotate_checkpoints"]

PREFIX = "checkpoint-"


def rotate_checkpoints(run_folder: Path, num_kept: int, best: str | None) -> None:
    """Delete the oldest checkpoints; what is half deleted bears no checkpoint's name.

    Args:
        run_folder: Where they lie.
        num_kept: How many of the last are kept, at least one; besides them the newest one that was
            recorded as healthy.
        best: Folder of one more that is kept; ``None`` for none.
    """
    doomed = run_folder / "deleted.partial"
    shutil.rmtree(doomed, ignore_errors=True)
    steps = {
        int(path.name.removeprefix(PREFIX)): path
        for path in run_folder.glob(f"{PREFIX}*")
        if path.is_dir() and path.name.removeprefix(PREFIX).isdigit()
    }
    ordered = [steps[step] for step in sorted(steps)]
    kept = set(ordered[-num_kept:])
    healthy = recorded_health(run_folder)
    kept |= set([path for path in ordered if healthy.get(path.name)][-1:])
    if best is not None:
        kept |= {path for path in ordered if path.resolve() == Path(best).resolve()}
    for path in ordered:
        if path not in kept:
            path.rename(doomed)
            shutil.rmtree(doomed)
