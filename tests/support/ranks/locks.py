"""Own a folder on several ranks."""

import contextlib
from pathlib import Path

from torch import distributed

from mfwrap.checkpoints.locks import RUN_LOCK, owning_together
from mfwrap.checkpoints.ownership import OwnedFolders

__all__ = ["own_folders_of_ranks", "own_one_after_the_other", "refuse_on_all", "try_together"]


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


def own_folders_of_ranks(rank: int, folder: str) -> list[list[bool]]:
    """Own folders that differ between the ranks; return which of them are locked by whom.

    Rank 0 has had a loop of its own before, so that the ranks count their loops differently.
    """
    seen = []
    if rank == 0:
        OwnedFolders().own(Path(folder, "alone"))
    for names in (("rank0", "rank1"), ("rank0", "shared"), ("shared", "rank1")):
        owned = OwnedFolders()
        own = Path(folder, names[rank])
        owned.own(own)
        owned.own(own / "more")
        owned.own(Path(folder, "shared"))
        seen.append([(each / RUN_LOCK).exists() for each in (own, own / "more")])
        distributed.barrier()
        owned.close()
        distributed.barrier()
    if rank == 1:
        OwnedFolders()  # for later tests, the ranks count alike again
    return seen


def refuse_on_all(rank: int, folder: str) -> list[str]:
    """Own a folder that rank 0 refuses at first; return what each attempt has said on this rank."""

    def check() -> None:
        if not said:
            msg = "in the way"
            raise FileExistsError(msg)

    said: list[str] = []
    with contextlib.closing(OwnedFolders()) as owned:
        for _ in range(2):
            try:
                owned.own(Path(folder), check if rank == 0 else None)
                said.append("owned")
            except OSError as error:
                said.append(f"{type(error).__name__}: {error}")
    return said
