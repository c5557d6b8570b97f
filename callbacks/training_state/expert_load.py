"""Measure how the tokens of a step are distributed over the experts of a network."""

from collections.abc import Mapping

from torch import Tensor


def shares_of(counts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the share of token assignments that each expert got.

    Args:
        counts: Tokens that each expert got, shape ``(E,)``, by module.

    Returns:
        Shape ``(E,)``, float32, by module. The shares of a module add up to 1.
    """
    return {name: (each / each.sum()).float() for name, each in counts.items()}


def imbalance(shares: Tensor) -> Tensor:
    """Return the ratio of the largest share to the mean share.

    A ratio of 1 means a balanced load; ``E`` means that one expert gets all tokens.

    Args:
        shares: Share of token assignments that each expert got, shape ``(E,)``.
    """
    return shares.max() * shares.numel()


def drop_rate(shares: Tensor, capacity_factor: float) -> Tensor:
    """Return the share of assignments that experts of limited capacity would drop.

    This is ``sum(relu(share - capacity_factor / E))``.

    Source: MindFormers, ``MoEDropRateCallback``.

    Args:
        shares: Share of token assignments that each expert got, shape ``(E,)``.
        capacity_factor: Capacity of an expert as a multiple of the mean share ``1 / E``.
    """
    return (shares - capacity_factor / shares.numel()).clamp(min=0).sum()
