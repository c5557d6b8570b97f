"""Programs in which two ranks differ in what they train, or agree."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from mfwrap import StepConfig
from mfwrap.preflight import check_ranks_agree, step_facts
from support.ranks.divergence import kept_reports

__all__ = ["DISAGREEMENTS", "agree", "disagree"]


def _facts(
    width: int = 3, dtype: torch.dtype = torch.float32, lr: float = 0.1, **settings: Any
) -> dict[str, dict[str, str]]:
    network = nn.Linear(2, width, dtype=dtype)
    optimizer = torch.optim.SGD(network.parameters(), lr=lr)
    return step_facts([network], [optimizer], StepConfig(**settings))


DISAGREEMENTS: dict[str, tuple[Callable[[int], tuple[Any, ...]], str]] = {
    "shape": (
        lambda rank: (_facts(width=3 + rank),),
        "; ".join(
            f"network: parameter {name}] on rank 0 but {other}] on rank 1"
            for name, other in (
                ("weight is float32[3, 2", "float32[4, 2"),
                ("bias is float32[3", "float32[4"),
            )
        ),
    ),
    "learning rate": (
        lambda rank: (_facts(lr=0.1 + 0.4 * rank),),
        "optimizer: lr of group 0 is 0.1 on rank 0 but 0.5 on rank 1",
    ),
    "setting": (
        lambda rank: (_facts(gradient_accumulation_steps=1 + rank),),
        "settings of the step: gradient_accumulation_steps is 1 on rank 0 but 2 on rank 1",
    ),
    "version": (
        lambda rank: (_facts() | {"versions": {"torch": f"2.{rank}"}},),
        "versions: torch is 2.0 on rank 0 but 2.1 on rank 1",
    ),
    "missing": (
        lambda rank: ({"callbacks": {"list": "A"}} if rank else {},),
        "callbacks: list is missing on rank 0 but A on rank 1",
    ),
    "a problem of one rank": (
        lambda rank: (_facts(), ["the disk is full"] if rank else []),
        "the disk is full (rank 1)",
    ),
    "the same problem": (lambda _: (_facts(), ["no space"]), "no space (ranks 0 and 1)"),
    "many": (
        lambda rank: ({"network": {str(n): str(rank) for n in range(7)}},),
        "; ".join(f"network: {n} is 0 on rank 0 but 1 on rank 1" for n in range(5))
        + "; and 2 more",
    ),
}
"""Functions from the rank to the arguments of `check_ranks_agree`, and the expected message."""


def disagree(rank: int, name: str) -> str:
    """Check ranks that disagree; return the message of the error."""
    make, _ = DISAGREEMENTS[name]
    with pytest.raises(RuntimeError) as caught:
        check_ranks_agree(*make(rank))
    return str(caught.value)


def agree(rank: int) -> list[str]:
    """Check ranks that differ only in the lengths of their data; return the warnings."""
    data = {"data": {"number of batches": str(8 + rank)}}
    with kept_reports("agree") as warnings:
        check_ranks_agree(_facts() | data, warned=["data"])
    return warnings
