"""Programs that each rank runs to call mfwrap's collectives."""

from typing import Any

import torch
from torch import Tensor, distributed

from mfwrap import collectives
from mfwrap.step.ranks.agreement import RankAgreement, Totals

__all__ = ["agreed_mean", "call_collectives", "fail_together", "own_tensor"]


def own_tensor(rank: int) -> Tensor:
    """Return the tensor that a rank passes to each collective."""
    return torch.tensor([1.0, 10.0]) * (rank + 1)


def call_collectives(rank: int) -> dict[str, Any]:
    """Call each collective, and return its results on this rank."""
    added, received = own_tensor(rank), own_tensor(rank)
    collectives.add_over_ranks(added)
    collectives.broadcast_from_main(received)
    cpu = torch.device("cpu")
    return {
        "num_ranks": collectives.num_ranks(),
        "this_rank": collectives.this_rank(),
        "added": added,
        "received": received,
        "any_first": collectives.any_rank(flag=rank == 0, device=cpu),
        "any_none": collectives.any_rank(flag=False, device=cpu),
        "on_all": collectives.gather_on_all(own_tensor(rank)),
        "on_main": collectives.gather_on_main(own_tensor(rank)),
        "objects": collectives.gather_objects({"rank": rank}),
    }


def agreed_mean(rank: int, squares: list[float]) -> Tensor:
    """Return the mean that the ranks agree on if rank ``r`` contributes ``squares[r]``."""
    own = Totals(torch.tensor(squares[rank]))
    return RankAgreement(distributed.group.WORLD)(own).square


class OwnError(Exception):
    """An error whose class other processes may not be able to unpickle."""

    def __init__(self, code: int, reason: str) -> None:
        super().__init__(f"{code}: {reason}")


def fail_together(rank: int, failing: dict[int, str]) -> tuple[str, str] | None:
    """Fail on some ranks; return the class and the message of the error that this rank raises.

    Args:
        rank: This rank.
        failing: Kind of the error by rank: ``"ValueError"``, ``"OSError"`` or ``"OwnError"``.
    """
    errors = {
        "ValueError": ValueError(f"of rank {rank}"),
        "OSError": FileNotFoundError(2, f"of rank {rank}", "file"),
        "OwnError": OwnError(rank, "own"),
    }
    try:
        with collectives.raising_together():
            if rank in failing:
                raise errors[failing[rank]]
    except (OSError, OwnError, RuntimeError, ValueError) as error:
        return type(error).__name__, str(error)
    return None
