"""Which updates of an optimizer were applied, told without a read on the host."""

from typing import Any, final

import torch
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor

__all__ = ["AppliedUpdates"]


@final
class AppliedUpdates:
    """Tell whether the last update was applied, in a loop that has no step's report.

    In fp16 a gradient scaler leaves out updates. It does not call the optimizer then, or, if that
    is a fused one, calls it with the flag ``found_inf`` on the device. A hook on the optimizer sees
    both: it notes the call and derives a flag of its own; nothing waits for the device. (Asking
    ``GradScaler.get_scale`` waits at every step, and accelerate's ``step_was_skipped`` denies the
    skip of a fused optimizer.)

    An optimizer that is none of torch's own kind (DeepSpeed's) is asked for ``step_was_skipped``.

    Args:
        optimizer: As a Trainer hands it to callbacks, in accelerate's wrapper or not. ``None``:
            all updates count as applied.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._was_called = False
        self._applied: Tensor | None = None
        inner = optimizer
        while isinstance(inner, AcceleratedOptimizer):
            inner = inner.optimizer
        self._handle: Any = None
        if isinstance(inner, torch.optim.Optimizer):
            # Before the update: the scaler takes its flag away after it.
            self._handle = inner.register_step_pre_hook(self._note)

    def last(self) -> Tensor | None:
        """Return whether the update since the last call was applied; does not wait.

        Returns:
            Of shape ``()``, bool; ``None`` says that it was.
        """
        if self._handle is None:
            was_skipped = bool(getattr(self._optimizer, "step_was_skipped", False))
            return torch.zeros((), dtype=torch.bool) if was_skipped else None
        was_called, self._was_called = self._was_called, False
        applied, self._applied = self._applied, None
        return applied if was_called else torch.zeros((), dtype=torch.bool)

    def close(self) -> None:
        """Take the hook off the optimizer."""
        if self._handle is not None:
            self._handle.remove()

    def _note(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        self._was_called = True
        found_inf: Tensor | None = getattr(optimizer, "found_inf", None)
        self._applied = None if found_inf is None else found_inf.reshape(()) == 0
