"""Restore the state of a step completely, or change nothing if any entry does not fit."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

from torch import Tensor

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


OwnedStates = Sequence[tuple[StateOwner, Mapping[str, Any]]]
"""Parts of an update, each with its state in a checkpoint."""


def state_of(owners: Iterable[StateOwner]) -> dict[str, Tensor]:
    """Return the states of all owners of an update as one mapping."""
    states = [owner.state_dict() for owner in owners]
    return {name: tensor for state in states for name, tensor in state.items()}


@final
@dataclass(frozen=True)
class StepState:
    """Loss scale, average and further parts of a step, which are saved and restored together.

    Attributes:
        loss_scale: Loss scale of the step.
        ema: Average of the weights; ``None`` without one.
    """

    loss_scale: LossScale
    ema: ExponentialMovingAverage | None

    def state_dict(self, further: Mapping[str, Any]) -> dict[str, Any]:
        """Return the states of loss scale and average, and those of `further` parts."""
        state = {"loss_scale": self.loss_scale.state_dict(), **further}
        if self.ema is not None:
            state["ema"] = self.ema.state_dict()
        return state

    def keys(self, *further: str) -> set[str]:
        """Return the keys of a state with `further` parts."""
        return {"loss_scale", *further} | (set() if self.ema is None else {"ema"})

    def check(self, state_dict: Mapping[str, Any], further: OwnedStates) -> None:
        """Raise the errors that `load_state_dict` would raise, without changing anything."""
        for owner, state in further:
            owner.check(state)
        self.loss_scale.check_state_dict(state_dict["loss_scale"])
        if self.ema is not None:
            self.ema.refuse_inside_swap("load_state_dict")
            self.ema.check_state_dict(state_dict["ema"])

    def load_state_dict(self, state_dict: Mapping[str, Any], further: OwnedStates) -> None:
        """Load each state into its owner, or change nothing if any state does not fit.

        Args:
            state_dict: State with the keys of `keys`.
            further: States of the further parts.

        Raises:
            KeyError: If a key is missing or unknown.
            RuntimeError: If the averages are swapped into the parameters.
            TypeError: If a value has the wrong type.
            ValueError: If a value has the wrong shape or range.
        """
        self.check(state_dict, further)
        for owner, state in further:
            owner.load_state_dict(state)
        self.loss_scale.load_state_dict(state_dict["loss_scale"])
        if self.ema is not None:
            self.ema.load_state_dict(state_dict["ema"])
