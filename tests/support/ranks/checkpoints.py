"""Programs that each rank runs to find a checkpoint."""

from pathlib import Path

from mfwrap.checkpoints import newest_checkpoint

__all__ = ["newest_of_rank"]


def newest_of_rank(rank: int, folder: str) -> str:
    """Look in a folder of this rank's own; return the answer or the error."""
    try:
        return str(newest_checkpoint(Path(folder, str(rank))))
    except ValueError as error:
        return f"ValueError: {error}"
