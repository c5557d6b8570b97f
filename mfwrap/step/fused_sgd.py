"""What torch's fused SGD needs to be skipped, and what it cannot update."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, final

import torch
from torch.optim import SGD, Optimizer


@final
class FusedSGD:
    """The parameter groups that torch's SGD updates, in an optimizer or a chain of optimizers.

    Args:
        optimizer: Optimizer without accelerate's wrapper, which holds the state.
        parts: The optimizers of the chain; `optimizer` alone if it is no chain.

    Raises:
        ValueError: If a fused group holds half-precision weights on the CPU, which torch does not
            update.
    """

    def __init__(self, optimizer: Optimizer, parts: Sequence[Optimizer]) -> None:
        self._optimizer = optimizer
        self._parts = [part for part in parts if isinstance(part, SGD)]
        for group in self._groups():
            half = any(p.device.type == "cpu" and p.dtype.itemsize < 4 for p in group["params"])
            if group.get("fused") and half:
                msg = (
                    "`optimizer` must update its weights, got fused SGD with half-precision "
                    "weights on CPU, which torch does not implement; use fused=False"
                )
                raise ValueError(msg)

    def _groups(self) -> list[dict[str, Any]]:
        return [group for part in self._parts for group in part.param_groups]

    @contextlib.contextmanager
    def unfused_where_momentum_begins_late(self) -> Iterator[None]:
        """Within the block, run without fused kernels the groups that fused SGD cannot update.

        Fused SGD raises ``TypeError`` if some parameters of a group have a momentum and others get
        their first gradient only now. torch's unfused SGD accepts this.
        """
        groups = [group for group in self._groups() if self._begins_late(group)]
        for group in groups:
            group["fused"] = False
        try:
            yield
        finally:
            for group in groups:
                group["fused"] = True

    def _begins_late(self, group: dict[str, Any]) -> bool:
        if not group["fused"] or group["momentum"] == 0:
            return False
        state = self._optimizer.state
        have_momentum = {
            state[parameter].get("momentum_buffer") is not None
            for parameter in group["params"]
            if parameter.grad is not None
        }
        return len(have_momentum) == 2

    def first_update_is_unsafe(self) -> bool:
        """Prepare the momentum; return whether the host must read the skip flag this time.

        Fused SGD allocates its momentum without initializing it. If the first update is skipped,
        the kernel that fills the momentum is skipped, too, and the momentum keeps arbitrary values.

        Without dampening, this method allocates zeros instead, which give exactly the same updates.
        With dampening, zeros would be wrong: the first momentum must be the undamped gradient, but
        an update that starts from zeros dampens it. So the host must know whether to skip.
        """
        unsafe = False
        for group in self._groups():
            if group["momentum"] == 0:
                continue
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self._optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    if group["dampening"] == 0:
                        state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                    else:
                        unsafe = True
        return unsafe
