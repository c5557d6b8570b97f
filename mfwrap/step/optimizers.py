"""Apply one divisor and one skip flag to any torch optimizer.

torch's fused Adam, AdamW, SGD and Adagrad divide the gradients by the attribute ``grad_scale``
and leave everything as it is when ``found_inf`` is 1, inside their own pass over the gradients.
For every other optimizer the flag is read on the host, once, and the gradients are divided in
place, once.
"""

import contextlib
import inspect
from typing import Any, final

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from mfwrap.arguments import needed_arguments
from mfwrap.step.shard_updates import holds_distributed, on_local_shards
from mfwrap.tensors.devices import on_device
from mfwrap.tensors.shards import local_tensors

__all__ = ["SkippableOptimizer", "learning_rates"]

_FUSED = (Adam, AdamW, SGD, Adagrad)


def learning_rates(optimizer: Optimizer, device: torch.device) -> Tensor:
    """Return the learning rates of all groups as they stand.

    Returns:
        Shape ``(number of groups,)``, float32, on `device`; a copy. Does not wait for it. Not a
        number for a group without a rate (transformers' Adafactor makes its own by default).
    """
    rates: list[Any] = [_given(group.get("lr")) for group in optimizer.param_groups]
    if all(isinstance(rate, float) for rate in rates) and len(set(rates)) == 1:
        return torch.full((len(rates),), rates[0], dtype=torch.float32, device=device)
    return torch.stack([_rate(rate, device) for rate in rates])


def _given(rate: Tensor | float | None) -> Tensor | float:
    return float("nan") if rate is None else rate


def _rate(rate: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(rate, Tensor):
        return on_device(rate.detach().reshape(()).float(), device)
    return torch.full((), rate, dtype=torch.float32, device=device)


@final
class SkippableOptimizer:
    """Run an optimizer on unscaled, clipped gradients, or not at all.

    With torch's fused optimizers nothing is read on the host, but for fused SGD with dampening
    until its first applied update; they run on the shards of distributed parameters. With any other
    optimizer a step reads one flag, once, and it runs on the distributed parameters as they are.

    Args:
        optimizer: The optimizer itself, no wrapper around it.

    Raises:
        TypeError: If the optimizer's step needs a closure.
        ValueError: If it is a fused SGD that does not update the weights it holds.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        _refuse_closure(optimizer)
        _refuse_idle_sgd(optimizer)
        self.optimizer = optimizer
        self._has_fused_kernel = _has_fused_kernel(optimizer)

    @property
    def skips_on_device(self) -> bool:
        """Whether the flag stays on the device; loading a state may change it."""
        groups = self.optimizer.param_groups
        return self._has_fused_kernel and all(group.get("fused") for group in groups)

    def step(self, divisor: Tensor | None, skip: Tensor) -> None:
        """Update the parameters from their gradients, unless told to skip.

        Args:
            divisor: Shape ``()``, float32: what the gradients are divided by; ``None`` stands
                for 1 and saves the pass.
            skip: Shape ``()``, bool: leave parameters, state and step counts as they are.
        """
        if self.skips_on_device and not self._first_update_is_unsafe():
            self._step_folded(divisor, skip)
        else:
            self._step_in_place(divisor, skip)

    def _step_folded(self, divisor: Tensor | None, skip: Tensor) -> None:
        optimizer: Any = self.optimizer
        # Exactly 0.0 or 1.0: the kernels compare with 1, and Adam subtracts it from its count.
        optimizer.found_inf = skip.float()
        if divisor is not None:
            optimizer.grad_scale = divisor
        shards = on_local_shards if holds_distributed(optimizer) else contextlib.nullcontext
        try:
            with shards(optimizer):
                optimizer.step()
        finally:
            # A later plain `optimizer.step()` must not divide or skip again.
            del optimizer.found_inf
            if divisor is not None:
                del optimizer.grad_scale

    def _step_in_place(self, divisor: Tensor | None, skip: Tensor) -> None:
        one = torch.ones_like(skip, dtype=torch.float32)
        flag, value = torch.stack((skip.float(), one if divisor is None else divisor)).tolist()
        if flag:
            return
        if value != 1:
            gradients = [
                parameter.grad
                for group in self.optimizer.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            ]
            # Not `mul_(1 / value)`: on CPU that rounds the number to the gradients' type first, and
            # float16 would lose all of it.
            torch._foreach_div_(local_tensors(gradients), value)
        self.optimizer.step()

    def _first_update_is_unsafe(self) -> bool:
        """Prepare fused SGD's momentum; return whether the flag must be read this time.

        Fused SGD allocates its momentum without initialising it and then skips the kernel that
        would have filled it. Zeros are exact without dampening; with dampening the first
        momentum is the bare gradient, which zeros would damp.
        """
        if not isinstance(self.optimizer, SGD):
            return False
        unsafe = False
        for group in self.optimizer.param_groups:
            if group["momentum"] == 0:
                continue
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.optimizer.state[parameter]
                if state.get("momentum_buffer") is None:
                    if group["dampening"] == 0:
                        state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                    else:
                        unsafe = True
        return unsafe


def _has_fused_kernel(optimizer: Optimizer) -> bool:
    kind = next((kind for kind in _FUSED if isinstance(optimizer, kind)), None)
    # A subclass with a step of its own may not hand the attributes on.
    return kind is not None and inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)


def _refuse_closure(optimizer: Optimizer) -> None:
    needed = needed_arguments(optimizer, "step")
    if needed:
        msg = (
            "`optimizer` must update from the gradients of one backward pass, got "
            f"{type(optimizer).__name__}, whose step needs {', '.join(needed)}; a closure "
            "evaluates the loss again"
        )
        raise TypeError(msg)


def _refuse_idle_sgd(optimizer: Optimizer) -> None:
    """Refuse half-precision weights on CPU, which torch's fused SGD leaves as they are."""
    if not isinstance(optimizer, SGD):
        return
    for group in optimizer.param_groups:
        half = any(p.device.type == "cpu" and p.dtype.itemsize < 4 for p in group["params"])
        if group.get("fused") and half:
            msg = (
                "`optimizer` must update its weights, got fused SGD with half-precision weights on "
                "CPU, which torch does not implement; use fused=False"
            )
            raise ValueError(msg)
