"""Own a folder on several ranks."""

from pathlib import Path

from mfwrap.checkpoints.locks import owning_together

__all__ = ["try_together"]


def try_together(rank: int, lock: str) -> str:
    """Own a lock together; return ``"owned"``, or the error of this rank."""
    del rank
    try:
        with owning_together(Path(lock)):
            return "owned"
    except OSError as error:
        return f"{type(error).__name__}: {error}"
