"""Restore the state of a step completely, or change nothing if any entry does not fit."""

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, Protocol

from torch import Tensor

from mfwrap.arguments import described
from mfwrap.average.ema import ExponentialMovingAverage
from mfwrap.loss_scale.live import LossScale


class StateOwner(Protocol):
    """A part of an update that has a state of its own, such as the counts of updates."""

    def replaced(self) -> list[tuple[object, str]]:
        """Return the attributes that an update sets to new tensors: owners and names."""

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state; the tensors do not change later."""

    def check(self, state_dict: Mapping[str, Any]) -> None:
        """Raise the errors that `load_state_dict` would raise, without changing anything."""

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the state; names of other owners are ignored."""


def state_of(owners: Iterable[StateOwner]) -> dict[str, Tensor]:
    """Return the states of all owners of an update as one mapping."""
    states = [owner.state_dict() for owner in owners]
    return {name: tensor for state in states for name, tensor in state.items()}


def check_keys(
    state_dict: object, expected: set[str], owner: str, *, optional: AbstractSet[str] = frozenset()
) -> None:
    """Check that a state has exactly the expected keys.

    Args:
        state_dict: State to check.
        expected: Keys that the state must have.
        owner: Kind of object that the state belongs to, for errors.
        optional: Keys that the state may have.

    Raises:
        KeyError: If a key is missing or unknown.
        TypeError: If `state_dict` is not a mapping.
    """
    if not isinstance(state_dict, Mapping):
        msg = f"`state_dict` must be a mapping, got {described(state_dict)}"
        raise TypeError(msg)
    if set(state_dict) - optional != expected - optional:
        msg = (
            f"`state_dict` of this {owner} must have the keys {sorted(expected)}, "
            f"got {sorted(state_dict)}"
        )
        raise KeyError(msg)


def check(
    loss_scale: tuple[LossScale, Mapping[str, Any]],
    owners: Sequence[tuple[StateOwner, Mapping[str, Any]]],
    ema: tuple[ExponentialMovingAverage, Mapping[str, Any]] | None,
) -> None:
    """Raise the errors that `restore` would raise, without changing anything."""
    for owner, state in owners:
        owner.check(state)
    scale, scale_state = loss_scale
    scale.check_state_dict(scale_state)
    if ema is not None:
        average, average_state = ema
        average.refuse_inside_swap("load_state_dict")
        average.check_state_dict(average_state)


def restore(
    loss_scale: tuple[LossScale, Mapping[str, Any]],
    owners: Sequence[tuple[StateOwner, Mapping[str, Any]]],
    ema: tuple[ExponentialMovingAverage, Mapping[str, Any]] | None,
) -> None:
    """Load each state into its owner, or change nothing if any state does not fit.

    Args:
        loss_scale: Pair of the loss scale and its state.
        owners: Pairs of the owners of an update's state and this state, for each optimizer.
        ema: Pair of the average and its state; ``None`` without an average.

    Raises:
        KeyError: If a key is missing or unknown.
        RuntimeError: If the averages are swapped into the parameters.
        TypeError: If a value has the wrong type.
        ValueError: If a value has the wrong shape or range.
    """
    check(loss_scale, owners, ema)
    for owner, state in owners:
        owner.load_state_dict(state)
    scale, scale_state = loss_scale
    scale.load_state_dict(scale_state)
    if ema is not None:
        average, average_state = ema
        average.load_state_dict(average_state)
