"""Apply one divisor and one skip flag to any torch optimizer.

torch's fused Adam, AdamW, SGD and Adagrad, and `AdamWeightDecay`, divide the gradients by the
optimizer's attribute ``grad_scale``, and change nothing if its attribute ``found_inf`` is 1. Both
happen inside the kernel that updates the weights. `mfwrap.optimizers.Muon` does the same without
such a kernel. For every other optimizer, `SkippableOptimizer` reads the skip flag on the host,
which synchronizes once per step, and divides the gradients in place.
"""

import contextlib
import inspect
import warnings
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from mfwrap.arguments import callers_stacklevel, needed_arguments
from mfwrap.compatibility.gradient_dtypes import replace_gradient
from mfwrap.compatibility.torch import foreach_copy_, foreach_div_, step_hooks
from mfwrap.optimizers.adam_weight_decay import AdamWeightDecay
from mfwrap.optimizers.after_update import acting_after
from mfwrap.optimizers.chained import parts_of
from mfwrap.optimizers.muon import Muon
from mfwrap.step.fused_sgd import FusedSGD
from mfwrap.step.optimizer_shards import holds_distributed, on_local_shards
from mfwrap.tensors.shards import is_distributed, local_tensors, placed_as

_FUSED = (Adam, AdamW, SGD, Adagrad, AdamWeightDecay)

_ZERO_IN_FLOAT16 = 2.0**-25
"""Largest number that is 0 in float16, whose smallest one is ``2**-24``."""


@final
class SkippableOptimizer:
    """Run an optimizer's step with all gradients divided by a number, or skip the step.

    torch's fused optimizers do not synchronize with the device, except for fused SGD with
    dampening, which synchronizes until each of its parameters has had an applied update. They run
    on the local shards of distributed parameters. `mfwrap.optimizers.Muon` does not synchronize
    either, and runs on the distributed parameters. So does any other optimizer, which synchronizes
    once per step to read the skip flag. A chain of optimizers synchronizes if any of them does.

    Args:
        optimizer: Optimizer without accelerate's wrapper.
        rounds: Whether gradients may be float32 although their parameters have half precision. Such
            a gradient is rounded to the dtype of its parameter for the step, once.

    Raises:
        TypeError: If the optimizer's step needs a closure.
        ValueError: If the optimizer is fused SGD with half-precision weights on the CPU, which
            torch does not update.

    Warns:
        UserWarning: If an ``eps`` is 0 in the dtype that the optimizer computes in.
    """

    def __init__(self, optimizer: Optimizer, *, rounds: bool = False) -> None:
        self._rounds = rounds
        self.optimizer = optimizer
        self._parts = parts_of(optimizer)
        for part in self._parts:
            _refuse_closure(part)
            _warn_of_vanishing_eps(part)
        has_sgd = any(isinstance(part, SGD) for part in self._parts)
        self._fused_sgd = FusedSGD(optimizer, self._parts) if has_sgd else None
        self._with_fused_kernels = tuple(part for part in self._parts if _keeps_step(part, _FUSED))
        self._others = tuple(part for part in self._parts if part not in self._with_fused_kernels)
        self._others_skip_on_device = all(_keeps_step(part, (Muon,)) for part in self._others)
        self.see_parameters()

    @property
    def skips_on_device(self) -> bool:
        """Whether the skip flag stays on the device.

        Loading an optimizer state may change this: the state includes ``fused``.
        """
        return self._others_skip_on_device and all(map(_is_fused, self._with_fused_kernels))

    @property
    def is_fused(self) -> bool:
        """Whether fused kernels do the whole step, so that a graph can hold it."""
        return not self._others and self.skips_on_device

    def step(self, divisor: Tensor | None, skip: Tensor, num_summed: int = 1) -> bool | None:
        """Update the parameters from their gradients, or do nothing if `skip` is true.

        Args:
            divisor: Divisor of the gradients, shape ``()``, float32. ``None`` means 1 and saves a
                pass over the gradients.
            skip: Whether to leave parameters, state and step counts unchanged; shape ``()``, bool.
            num_summed: Part of `divisor` by which float32 gradients of float16 parameters are
                divided before they are rounded, because float16 may hold no sum of gradients.

        Returns:
            Value of `skip` if the host had to read it; ``None`` if it stayed on the device.
        """
        sgd = self._fused_sgd
        if self.skips_on_device and (sgd is None or not sgd.first_update_is_unsafe()):
            self._step_folded(divisor, skip, num_summed)
            return None
        return self._step_in_place(divisor, skip)

    def discard_forwards(self) -> None:
        """Let what acts after an update forget the forward passes since the last step."""
        if step_hooks(self.optimizer) or any(map(step_hooks, self._parts)):
            for each in acting_after(self.optimizer):
                each.discard()

    def refuse_what_needs_whole_networks(self) -> None:
        """Raise ``ValueError`` if something acts after an update that a stage must not have."""
        for each in acting_after(self.optimizer):
            msg = (
                f"{type(each).__name__} must have the whole network on each rank, got a stage of a "
                "pipeline; call its `remove`"
            )
            raise ValueError(msg)

    def _step_folded(self, divisor: Tensor | None, skip: Tensor, num_summed: int) -> None:
        if divisor is not None and num_summed > 1 and self._holds_sums_for_float16():
            _divide_gradients(self.optimizer, num_summed)
            divisor = divisor / num_summed
        # `found_inf` must be exactly 0.0 or 1.0: the kernels compare it with 1, and Adam subtracts
        # `found_inf` from its step count.
        attributes = {"found_inf": skip.float()}
        if divisor is not None:
            attributes["grad_scale"] = divisor
        if self._rounds:
            # The kernel divides in float32, so this is the only rounding.
            round_gradients(self.optimizer)
        try:
            for part in self._parts:
                vars(part).update(attributes)
            with self._shards():
                self.optimizer.step()
        finally:
            # If these attributes stayed, a later plain `optimizer.step()` would divide or skip
            # again.
            for part in self._parts:
                for name in attributes:
                    vars(part).pop(name, None)

    def _holds_sums_for_float16(self) -> bool:
        return self._rounds and any(
            parameter.dtype == torch.float16
            and parameter.grad is not None
            and parameter.grad.dtype == torch.float32
            for group in self.optimizer.param_groups
            for parameter in group["params"]
        )

    def _step_in_place(self, divisor: Tensor | None, skip: Tensor) -> bool:
        one = torch.ones_like(skip, dtype=torch.float32)
        flag, value = torch.stack((skip.float(), one if divisor is None else divisor)).tolist()
        if flag:
            if self._rounds:
                round_gradients(self.optimizer)
            self.discard_forwards()  # no step follows, whose hook would take them
            return True
        if value != 1:
            _divide_gradients(self.optimizer, value)
        if self._rounds:
            round_gradients(self.optimizer)
        with contextlib.ExitStack() as stack:
            if self._fused_sgd is not None:
                stack.enter_context(self._fused_sgd.unfused_where_momentum_begins_late())
            stack.enter_context(self._shards())
            self.optimizer.step()
        return False

    @contextlib.contextmanager
    def _shards(self) -> Iterator[None]:
        """Within the block, give fused optimizers this rank's shards of distributed parameters."""
        with contextlib.ExitStack() as stack:
            for part in self._with_shards:
                if _is_fused(part):
                    stack.enter_context(on_local_shards(part))
            yield

    def see_parameters(self) -> None:
        """Note which parts hold distributed parameters; call it when the parameters change."""
        self._with_shards = tuple(filter(holds_distributed, self._with_fused_kernels))


@torch.no_grad()
def _divide_gradients(optimizer: Optimizer, value: float) -> None:
    gradients = [
        parameter.grad
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None
    ]
    if gradients:  # torch refuses an empty list
        # Do not multiply by `1 / value`: on CPU torch first rounds a factor to the gradients'
        # dtype, and in float16 the inverse of a large scale becomes 0.
        foreach_div_(local_tensors(gradients), value)


def round_gradients(optimizer: Optimizer) -> None:
    """Round float32 gradients of half-precision parameters to the dtype of their parameter.

    Rounds to the nearest number, all gradients in one call, and frees the float32 gradients. Does
    not synchronize with the device.
    """
    held = [
        (parameter, parameter.grad)
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.grad is not None and parameter.grad.dtype != parameter.dtype
    ]
    if not held:
        return
    exact = local_tensors([gradient for _, gradient in held])
    rounded = [
        torch.empty_like(each, dtype=parameter.dtype)
        for each, (parameter, _) in zip(exact, held, strict=True)
    ]
    foreach_copy_(rounded, exact)
    for (parameter, gradient), each in zip(held, rounded, strict=True):
        placed = placed_as(each, parameter) if is_distributed(gradient) else each
        replace_gradient(parameter, placed)


def _is_fused(optimizer: Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def _keeps_step(optimizer: Optimizer, kinds: tuple[type[Optimizer], ...]) -> bool:
    """Return whether an optimizer is of one of the kinds, and its step is that of the kind."""
    kind = next((kind for kind in kinds if isinstance(optimizer, kind)), None)
    # A subclass that overrides `step` may ignore `grad_scale` and `found_inf`.
    return kind is not None and inspect.unwrap(type(optimizer).step) is inspect.unwrap(kind.step)


def _warn_of_vanishing_eps(optimizer: Optimizer) -> None:
    """Warn if an optimizer of torch divides by 0 where the gradients of float16 weights are small.

    torch's unfused optimizers compute in the dtype of the weights. In float16 the square of a
    gradient below 2e-4 is 0, and so is an ``eps`` below 3e-8.
    """
    if not type(optimizer).__module__.startswith("torch.optim."):
        return
    for group in optimizer.param_groups:
        eps = group.get("eps")
        vanishes = isinstance(eps, float) and 0 < eps <= _ZERO_IN_FLOAT16
        if group.get("fused") or not vanishes:
            continue
        if any(parameter.dtype == torch.float16 for parameter in group["params"]):
            warnings.warn(
                "`optimizer` makes float16 weights NaN where their gradients are small, because "
                f"{type(optimizer).__name__}'s eps of {eps:g} is 0 in float16; load the weights in "
                "float32 and compute in float16 by autocast, as accelerate's "
                "mixed_precision='fp16' does",
                stacklevel=callers_stacklevel(),
            )
            return


def _refuse_closure(optimizer: Optimizer) -> None:
    needed = needed_arguments(optimizer, "step")
    if needed:
        msg = (
            "`optimizer` must update from the gradients of one backward pass, got "
            f"{type(optimizer).__name__}, whose step needs {', '.join(needed)}; a closure "
            "evaluates the loss again"
        )
        raise TypeError(msg)
