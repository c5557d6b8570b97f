"""Hold the current loss scale of a run: a tensor on the device, and the cell that changes it."""

from collections.abc import Mapping
from typing import Any, final

import torch
from torch import Tensor

from mfwrap.arguments import described
from mfwrap.loss_scale.cells import LossScaleUpdateCell
from mfwrap.tensors.saved_state import check_keys

ScaleSense = float | Tensor | LossScaleUpdateCell
"""Type of the argument ``scale_sense`` of `MFTrainOneStepCell`."""


@final
class LossScale:
    """Hold the current loss scale of a run on its device.

    Source: MindSpore, ``TrainOneStepWithLossScaleCell.scale_sense``.

    Args:
        scale_sense: A number, a tensor of shape ``()`` or ``(1,)``, or an update cell.
        device: Device of the scale.

    Raises:
        TypeError: If `scale_sense` is anything else.
        ValueError: If a tensor has another shape, or the scale is not > 0 and finite.
    """

    def __init__(self, scale_sense: ScaleSense, device: torch.device) -> None:
        self.update_cell = scale_sense if isinstance(scale_sense, LossScaleUpdateCell) else None
        number = _initial_number(scale_sense)
        self.value = torch.full((), number, dtype=torch.float32, device=device)
        """Current loss scale: shape ``()``, float32, changed in place."""
        self.is_one = number == 1 and self.update_cell is None
        """Whether the host knows that the scale is 1, so that no multiplication is needed."""
        if self.update_cell is not None:
            self.update_cell.to(device)

    def set(self, sens: Tensor) -> None:
        """Replace the scale in place.

        Does not synchronize with the device. A value that is not positive and finite shows up as an
        overflow of the next step, not as an error.

        Args:
            sens: New loss scale, shape ``()`` or ``(1,)``, any real dtype.

        Raises:
            TypeError: If `sens` is not a tensor.
            ValueError: If `sens` has a different shape.
        """
        if not isinstance(sens, Tensor):
            msg = f"`sens` must be a tensor, got {described(sens)}"
            raise TypeError(msg)
        _check_shape("sens", sens)
        if sens.device.type == "cpu" and self.value.device.type != "cpu":
            # The value is on the host already. A copy from pinned memory would still be on its way
            # when the loop changes the memory; one from other memory would wait for the device.
            self.value.fill_(sens.item())
        else:
            self.value.copy_(sens.detach().reshape(()), non_blocking=True)
        self.is_one = False

    def divisor(self) -> Tensor | None:
        """Return a copy of the scale; ``None`` if the host knows that it is 1."""
        return None if self.is_one else self.value.clone()

    def update(self, overflow: Tensor) -> Tensor:
        """Let the update cell change the scale after a step, and return `overflow`."""
        if self.update_cell is None:
            return overflow
        return self.update_cell(self.value, overflow)

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the scale and of the update cell's counters."""
        counters = {} if self.update_cell is None else self.update_cell.state_dict()
        return {"value": self.value.clone(), "update_cell": counters}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the scale and the counters, or change nothing if `state_dict` does not fit.

        Raises:
            KeyError: If a key is missing or unknown.
            TypeError: If a value has the wrong type.
            ValueError: If a value has the wrong shape, or the scale is not > 0 and finite.
        """
        number = self.check_state_dict(state_dict)
        if self.update_cell is not None:
            self.update_cell.load_state_dict(state_dict["update_cell"])
        self.value.fill_(number)
        self.is_one = number == 1 and self.update_cell is None

    def check_state_dict(self, state_dict: Mapping[str, Any]) -> float:
        """Return the scale in `state_dict`, or raise the errors of `load_state_dict`."""
        check_keys(state_dict, {"value", "update_cell"}, "loss scale")
        value = state_dict["value"]
        if not isinstance(value, Tensor):
            msg = f"`state_dict['value']` must be a tensor, got {described(value)}"
            raise TypeError(msg)
        _check_shape("state_dict['value']", value)
        number = _checked_number("state_dict['value']", value.item())
        counters = state_dict["update_cell"]
        if self.update_cell is not None:
            self.update_cell.check_state_dict(counters)
        elif counters:
            msg = (
                "`state_dict` of a fixed loss scale must not have counters of an update cell, "
                f"got {counters}; build the step with the update cell that the state was "
                "saved with"
            )
            raise KeyError(msg)
        return number


def _initial_number(scale_sense: ScaleSense) -> float:
    if isinstance(scale_sense, LossScaleUpdateCell):
        return _checked_number("scale_sense", scale_sense.get_loss_scale())
    if isinstance(scale_sense, Tensor):
        _check_shape("scale_sense", scale_sense)
        return _checked_number("scale_sense", scale_sense.item())
    if isinstance(scale_sense, (int, float)):
        return _checked_number("scale_sense", scale_sense)
    expected = "a number, a tensor of shape () or (1,), or a loss-scale update cell"
    raise wrong_type_of_scale(expected, scale_sense)


def wrong_type_of_scale(expected: str, scale_sense: object) -> TypeError:
    """Return the error for a `scale_sense` of a wrong type.

    Args:
        expected: The types that are allowed.
        scale_sense: The value of the wrong type.
    """
    msg = f"`scale_sense` must be {expected}, got {described(scale_sense)}"
    if scale_sense is None:
        # This is what `get_update_cell` of such a manager returns.
        msg += (
            "; a loss-scale manager with drop_overflow_update=False has no update cell: pass the "
            "manager itself to `Model`"
        )
    return TypeError(msg)


def _check_shape(name: str, tensor: Tensor) -> None:
    if tensor.shape not in ((), (1,)):
        msg = f"`{name}` must have shape () or (1,), got {tuple(tensor.shape)}"
        raise ValueError(msg)


def _checked_number(name: str, number: float) -> float:
    in_range = 0 < number <= torch.finfo(torch.float32).max
    # A positive number can still round to zero in float32.
    if not in_range or torch.tensor(number, dtype=torch.float32, device="cpu") == 0:
        msg = f"`{name}` must be > 0 and finite in float32, got {number}"
        raise ValueError(msg)
    return float(number)
