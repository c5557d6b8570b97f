"""Own a folder on several ranks."""

from pathlib import Path

from mfwrap.checkpoints.folders import OwnedFolders
from mfwrap.checkpoints.locks import owning_together

__all__ = ["own_one_after_the_other", "try_together"]


def try_together(rank: int, lock: str) -> str:
    """Own a lock together; return ``"owned"``, or the error of this rank."""
    del rank
    try:
        with owning_together(Path(lock)):
            return "owned"
    except OSError as error:
        return f"{type(error).__name__}: {error}"


def own_one_after_the_other(rank: int, folder: str) -> list[str]:
    """Own a folder twice, without collectives; return what each attempt has said."""
    del rank
    said = []
    for _ in range(2):
        owned = OwnedFolders()
        try:
            owned.own(Path(folder))
            owned.own(Path(folder))
            said.append("owned")
        except OSError as error:
            said.append(f"{type(error).__name__}: {error}")
        if len(said) == 2:
            owned.close()
    return said
