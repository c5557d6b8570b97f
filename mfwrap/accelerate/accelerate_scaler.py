"""What stands in the place of accelerate's gradient scaler."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from mfwrap.accelerate.classes import Attachment, inner_optimizer
from mfwrap.arguments import described
from mfwrap.loss_scale.cells import DynamicLossScaleUpdateCell

__all__ = ["StepScaler"]


class StepScaler:
    """`torch.amp.GradScaler`'s protocol, by which accelerate scales losses and does updates.

    Args:
        attachment: Where the step is.
        grad_scaler: accelerate's own, for the settings that its checkpoints hold; ``None`` if it
            has none.
    """

    def __init__(self, attachment: Attachment, grad_scaler: Any) -> None:
        self.attachment = attachment
        self._grad_scaler = grad_scaler

    def is_enabled(self) -> bool:
        """Return True: losses are scaled, though maybe by 1."""
        return True

    def scale(self, outputs: Tensor) -> Tensor:
        """Return a loss times the loss scale."""
        self.attachment.build(final=True)
        return self.attachment.step.scaled(outputs)

    def unscale_(self, optimizer: Optimizer) -> None:
        """Divide an optimizer's gradients by the loss scale, in place, once."""
        self.attachment.build(final=True)
        self.attachment.step.unscale([inner_optimizer(optimizer)])

    def step(self, optimizer: Optimizer, closure: None = None) -> None:
        """Do one update of an optimizer.

        Raises:
            TypeError: If a closure is given: a loss that it evaluates would not be scaled.
        """
        if closure is not None:
            msg = f"`closure` must be None with a loss scale, got {described(closure)}"
            raise TypeError(msg)
        self.attachment.build(final=True)
        self.attachment.step.update(inner_optimizer(optimizer))

    def update(self, new_scale: Tensor | float | None = None) -> None:
        """Set the loss scale if one is given; otherwise the step has changed it already."""
        if new_scale is not None:
            loss_scale = self.attachment.step.loss_scale
            loss_scale.set(loss_scale.value.new_tensor(new_scale))

    def get_scale(self) -> float:
        """Return the loss scale; waits for the device."""
        return self.attachment.step.loss_scale.value.item()

    def state_dict(self) -> dict[str, Any]:
        """Return a state that a GradScaler of accelerate's settings can load."""
        state: dict[str, Any] = {} if self._grad_scaler is None else self._grad_scaler.state_dict()
        state["scale"] = self.get_scale()
        cell = self.attachment.step.loss_scale.update_cell
        if isinstance(cell, DynamicLossScaleUpdateCell):
            # torch counts steps since the scale changed from 0, MindSpore from 1.
            state["_growth_tracker"] = int(cell.cur_iter - cell.last_overflow_iter) - 1
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the scale of a GradScaler's state."""
        self.update(state_dict["scale"])
