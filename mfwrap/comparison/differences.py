"""Kinds of differences between two runs, in the order in which a step causes them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, TypeVar, final, get_args

Kind: TypeAlias = Literal[
    "random numbers",
    "data",
    "loss scale",
    "learning rate",
    "loss",
    "forward pass",
    "gradient",
    "skipped update",
    "optimizer state",
    "weight",
    "evaluation",
]

CAUSES: tuple[Kind, ...] = ("random numbers", "data", "loss scale", "learning rate")
"""What a step is given. A difference explains later differences."""

RESULTS: tuple[Kind, ...] = tuple(kind for kind in get_args(Kind) if kind not in CAUSES)
"""What a step computes, in this order."""

SMALLEST_SHARE = 0.01
"""Share of the norm of all tensors that a smaller tensor counts as having, within a tolerance.

Some gradients are zero but for rounding, such as those of the biases of attention keys. Two runs
never agree on them, relative to their own norms. Adam makes weights of them that differ as well."""

Value = TypeVar("Value")
Pairs: TypeAlias = dict[tuple[str, int], tuple[Value, Value]]
"""What both runs have recorded, by name and rank."""

Outcome: TypeAlias = "dict[Kind, Difference | None]"
"""Difference of each kind that both runs have recorded; ``None`` where they are equal."""


class Row(NamedTuple):
    """A row of a batch."""

    rank: int
    micro_batch: int
    row: int


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What differs between two runs at one step, of one kind."""

    step: int
    kind: Kind
    name: str | None = None
    """What differs first: a parameter, an input, a number. ``None`` if the records do not say."""

    ranks: tuple[int, ...] = ()
    """Ranks where it differs; empty if that is all ranks, or unknown."""

    num_differing: int = 1
    num_compared: int = 1
    values: tuple[float, float] | None = None
    """Number in the first run and in the second run; ``None`` for tensors and data."""

    relative: float | None = None
    """Difference divided by the larger magnitude; for a tensor, estimated from its sketch. ``None``
    for data and random numbers."""

    rows: tuple[Row, ...] = ()
    """Rows of the batch that differ; empty if the runs divide the batch differently."""

    num_rows: int = 0
    """Number of rows that were compared in their places."""

    only_in: tuple[tuple[Row, ...], tuple[Row, ...]] = ((), ())
    """If the runs divide the batch differently: the rows of each run that the other does not
    have."""

    is_other_order: bool = False
    """Whether both batches have the same rows in another order."""

    at_start: bool = False
    """Whether these are the weights with which a training started after `step` steps."""


def difference_of(
    step: int,
    kind: Kind,
    differing: Collection[tuple[str, int]],
    compared: Collection[tuple[str, int]],
    **found: Any,
) -> Difference:
    """Return a difference with its ranks and counts.

    Args:
        step: Number of the step.
        kind: Kind of what was compared.
        differing: Name and rank of what differs.
        compared: Name and rank of what was compared.
        found: Further fields.
    """
    ranks = {rank for _, rank in differing}
    return Difference(
        step=step,
        kind=kind,
        ranks=() if ranks == {rank for _, rank in compared} else tuple(sorted(ranks)),
        num_differing=len({name for name, _ in differing}),
        num_compared=len({name for name, _ in compared}),
        **found,
    )


def first_in_backward(names: Sequence[str], num_compared: int, *, can_name: bool) -> str | None:
    """Return the gradient that backward reaches first, of those that differ.

    Backward goes from the last parameter to the first, so a difference that begins in a layer
    spreads to the layers before it. If all gradients differ, or the forward pass differs already,
    no layer can be named.

    Args:
        names: Gradients that differ, in the order of the network.
        num_compared: Number of gradients that were compared.
        can_name: Whether the losses were compared and are equal, and the order is known.
    """
    if len(names) == 1:
        return names[0]
    return names[-1] if can_name and len(names) < num_compared else None
