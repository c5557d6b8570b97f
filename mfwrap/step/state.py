"""Restore the state of a step: all of its parts, or none if one does not fit."""

from collections.abc import Mapping, Sequence
from typing import Any

from mfwrap.arguments import described
from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.loss_scale.live import LossScale
from mfwrap.step.counts import UpdateCounts


def check_keys(state_dict: object, expected: set[str], owner: str) -> None:
    """Check that a state has the keys that its owner writes.

    Raises:
        KeyError: If a key is missing or unknown.
        TypeError: If `state_dict` is not a mapping.
    """
    if not isinstance(state_dict, Mapping):
        msg = f"`state_dict` must be a mapping, got {described(state_dict)}"
        raise TypeError(msg)
    if set(state_dict) != expected:
        msg = (
            f"`state_dict` of this {owner} must have the keys {sorted(expected)}, "
            f"got {sorted(state_dict)}"
        )
        raise KeyError(msg)


def check(
    loss_scale: tuple[LossScale, Mapping[str, Any]],
    counts: Sequence[tuple[UpdateCounts, Mapping[str, Any]]],
    ema: tuple[ExponentialMovingAverage, Mapping[str, Any]] | None,
) -> None:
    """Raise what `restore` would raise; change nothing."""
    for owner, state in counts:
        owner.check(state)
    scale, scale_state = loss_scale
    scale.check_state_dict(scale_state)
    if ema is not None:
        average, average_state = ema
        average.refuse_inside_swap("load_state_dict")
        average.check_state_dict(average_state)


def restore(
    loss_scale: tuple[LossScale, Mapping[str, Any]],
    counts: Sequence[tuple[UpdateCounts, Mapping[str, Any]]],
    ema: tuple[ExponentialMovingAverage, Mapping[str, Any]] | None,
) -> None:
    """Load each state into its owner; nothing is changed if any state does not fit.

    Args:
        loss_scale: Loss scale and its state.
        counts: Counts of each optimizer's updates and their states.
        ema: Average and its state; ``None`` for none.

    Raises:
        KeyError: If a key is missing or unknown.
        RuntimeError: If the averages are swapped into the parameters.
        TypeError: If a value has the wrong type.
        ValueError: If a value has the wrong shape or range.
    """
    check(loss_scale, counts, ema)
    for owner, state in counts:
        owner.load_state_dict(state)
    scale, scale_state = loss_scale
    scale.load_state_dict(scale_state)
    if ema is not None:
        average, average_state = ema
        average.load_state_dict(average_state)
