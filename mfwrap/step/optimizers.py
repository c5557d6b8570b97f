"""Apply one divisor and one skip flag to any torch optimizer.

torch's fused Adam, AdamW, SGD and Adagrad, and `AdamWeightDecay`, divide the gradients by the
optimizer's attribute ``grad_scale``, and change nothing if its attribute ``found_inf`` is 1. Both
happen inside the kernel that updates the weights. `mfwrap.optimizers.Muon` does the same without
such a kernel. For every other optimizer, `SkippableOptimizer` reads the skip flag on the host,
which synchronizes once per step, and divides the gradients in place.
"""

import contextlib
import inspect
import logging
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from mfwrap.arguments import needed_arguments
from mfwrap.compatibility.gradient_dtypes import replace_gradient
from mfwrap.compatibility.torch import foreach_copy_, foreach_div_, step_hooks
from mfwrap.optimizers.adam_weight_decay import AdamWeightDecay
from mfwrap.optimizers.chained import parts_of
from mfwrap.optimizers.muon import Muon
from mfwrap.optimizers.qk_clip import discard_logits
from mfwrap.tensors.shards import is_distributed, local_tensor, local_tensors, on_device

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_logger = logging.getLogger("mfwrap")

_FUSED = (Adam, AdamW, SGD, Adagrad, AdamWeightDecay)


def learning_rates(
    optimizer: Optimizer, device: torch.device, *, may_be_bad: bool = False
) -> Tensor:
    """Return the present learning rates of all groups.

    Args:
        optimizer: Optimizer without accelerate's wrapper.
        device: Device of the result.
        may_be_bad: Whether to return a non-finite number instead of raising.

    Returns:
        Copy of shape ``(number of groups,)``, float32, on `device`. NaN for a group without a rate
        (transformers' Adafactor computes its own by default). Does not synchronize with the device.

    Raises:
        ValueError: If a rate is a number and non-finite, unless `may_be_bad`. A rate that is a
            tensor is not read; see `has_bad_rate`.
    """
    fault = None if may_be_bad else bad_rate(optimizer)
    if fault is not None:
        raise ValueError(fault)
    rates = [math.nan if (lr := g.get("lr")) is None else lr for g in optimizer.param_groups]
    if all(isinstance(rate, float) for rate in rates) and len(set(rates)) == 1:
        return torch.full((len(rates),), rates[0], dtype=torch.float32, device=device)
    return torch.stack([_rate(rate, device) for rate in rates])


@contextlib.contextmanager
def lowered_rates(optimizer: Optimizer, factor: float) -> Iterator[None]:
    """Within the block, multiply the learning rates of all groups by a factor.

    Do pending steps of schedules before: they compute new rates from those of the groups.

    Args:
        optimizer: Optimizer without accelerate's wrapper.
        factor: Factor of the rates; 1 changes nothing. A group without a rate stays as it is.
    """
    if factor == 1:
        yield
        return
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate * factor  # a new tensor, if the rate is one
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate


def group_names(optimizer: Optimizer) -> tuple[str, ...]:
    """Return the entry ``name`` of each parameter group; nothing unless each group has a name."""
    names = [group.get("name") for group in optimizer.param_groups]
    return () if None in names else tuple(map(str, names))


def has_bad_rate(optimizer: Optimizer, device: torch.device) -> Tensor | None:
    """Return whether a learning rate is non-finite, without reading a rate that is a tensor.

    A non-finite number is logged.

    Returns:
        Shape ``()``, bool, on `device`; ``None`` if all rates are finite numbers.
    """
    fault = bad_rate(optimizer)
    if fault is not None:
        _logger.warning("all stages of the pipeline skip an update: %s", fault)
        return torch.ones((), dtype=torch.bool, device=device)
    rates = [rate for g in optimizer.param_groups if isinstance(rate := g.get("lr"), Tensor)]
    if not rates:
        return None
    return ~torch.stack([_rate(rate, device) for rate in rates]).isfinite().all()


def bad_rate(optimizer: Optimizer) -> str | None:
    """Describe the first learning rate that is a non-finite number; ``None`` if there is none."""
    for number, group in enumerate(optimizer.param_groups):
        rate = group.get("lr")
        if rate is not None and not isinstance(rate, Tensor) and not math.isfinite(rate):
            return (
                f"the learning rate of parameter group {number} must be finite, got {rate}; no "
                "weight was changed; check the schedule, and callbacks that set the rate"
            )
    return None


def _rate(rate: Tensor | float, device: torch.device) -> Tensor:
    if isinstance(rate, Tensor):
        return on_device(rate.detach().reshape(()).float(), device)
    return torch.full((), rate, dtype=torch.float32, device=device)


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
    """

    def __init__(self, optimizer: Optimizer, *, rounds: bool = False) -> None:
        self._rounds = rounds
        self.optimizer = optimizer
        self._parts = parts_of(optimizer)
        for part in self._parts:
            _refuse_closure(part)
            _refuse_idle_sgd(part)
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

    def step(self, divisor: Tensor | None, skip: Tensor, num_added: int = 1) -> bool | None:
        """Update the parameters from their gradients, or do nothing if `skip` is true.

        Args:
            divisor: Divisor of the gradients, shape ``()``, float32. ``None`` means 1 and saves a
                pass over the gradients.
            skip: Whether to leave parameters, state and step counts unchanged; shape ``()``, bool.
            num_added: Part of `divisor` by which float32 gradients of float16 parameters are
                divided before they are rounded, because float16 may hold no sum of gradients.

        Returns:
            Value of `skip` if the host had to read it; ``None`` if it stayed on the device.
        """
        if self.skips_on_device and not self._first_update_is_unsafe():
            self._step_folded(divisor, skip, num_added)
            return None
        return self._step_in_place(divisor, skip)

    def discard_logits(self) -> None:
        """Let `QKClip` forget the logits since the last step of this optimizer."""
        if step_hooks(self.optimizer) or any(map(step_hooks, self._parts)):
            discard_logits(self.optimizer)

    def _step_folded(self, divisor: Tensor | None, skip: Tensor, num_added: int) -> None:
        if divisor is not None and num_added > 1 and self._holds_sums_for_float16():
            _divide_gradients(self.optimizer, num_added)
            divisor = divisor / num_added
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
            self.discard_logits()  # no step follows, whose hook would take them
            return True
        if value != 1:
            _divide_gradients(self.optimizer, value)
        if self._rounds:
            round_gradients(self.optimizer)
        with self._unfused_where_momentum_begins_late(), self._shards():
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

    @contextlib.contextmanager
    def _unfused_where_momentum_begins_late(self) -> Iterator[None]:
        """Within the block, run without fused kernels the groups that fused SGD cannot update.

        Fused SGD raises ``TypeError`` if some parameters of a group have a momentum and others get
        their first gradient only now. torch's unfused SGD accepts this.
        """
        groups = [group for group in self._groups_of_sgd() if self._begins_late(group)]
        for group in groups:
            group["fused"] = False
        try:
            yield
        finally:
            for group in groups:
                group["fused"] = True

    def _groups_of_sgd(self) -> list[dict[str, Any]]:
        kinds = (part for part in self._parts if isinstance(part, SGD))
        return [group for part in kinds for group in part.param_groups]

    def _begins_late(self, group: dict[str, Any]) -> bool:
        if not group["fused"] or group["momentum"] == 0:
            return False
        state = self.optimizer.state
        have_momentum = {
            state[parameter].get("momentum_buffer") is not None
            for parameter in group["params"]
            if parameter.grad is not None
        }
        return len(have_momentum) == 2

    def _first_update_is_unsafe(self) -> bool:
        """Prepare fused SGD's momentum; return whether the host must read the skip flag this time.

        Fused SGD allocates its momentum without initializing it. If the first update is skipped,
        the kernel that fills the momentum is skipped, too, and the momentum keeps arbitrary values.

        Without dampening, this method allocates zeros instead, which give exactly the same updates.
        With dampening, zeros would be wrong: the first momentum must be the undamped gradient, but
        an update that starts from zeros dampens it. So the host must know whether to skip.
        """
        unsafe = False
        for group in self._groups_of_sgd():
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
        placed = _placed("grad", each, parameter) if is_distributed(gradient) else each
        replace_gradient(parameter, placed)


def _is_fused(optimizer: Optimizer) -> bool:
    return all(group.get("fused") for group in optimizer.param_groups)


def _keeps_step(optimizer: Optimizer, kinds: tuple[type[Optimizer], ...]) -> bool:
    """Return whether an optimizer is of one of the kinds, and its step is that of the kind."""
    kind = next((kind for kind in kinds if isinstance(optimizer, kind)), None)
    # A subclass that overrides `step` may ignore `grad_scale` and `found_inf`.
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
    """Raise if fused SGD holds half-precision weights on the CPU, which torch does not update."""
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


def holds_distributed(optimizer: Optimizer) -> bool:
    """Return whether any of an optimizer's parameters is distributed over ranks."""
    return any(is_distributed(p) for group in optimizer.param_groups for p in group["params"])


@contextlib.contextmanager
def on_local_shards(optimizer: Optimizer) -> Iterator[None]:
    """Within the block, give the optimizer this rank's shards instead of distributed tensors.

    torch's fused SGD and Adagrad do not accept distributed tensors. No fused kernel accepts
    distributed tensors together with plain ones, or distributed tensors of two meshes.

    A fused update works element by element, and the shards share the storage of the distributed
    tensors. So an update of the shards has the same result. After the block, parameters and state
    are distributed again, as checkpoints need them. Hooks of the optimizer's step see the shards.

    Args:
        optimizer: Optimizer whose state tensors, except for ``step``, have the shapes of their
            parameters.
    """
    groups = [list(group["params"]) for group in optimizer.param_groups]
    shards = {p: _shard_of(p) for held in groups for p in held if is_distributed(p)}
    state: Any = optimizer.state
    for parameter, shard in shards.items():
        if parameter in state:
            state[shard] = {name: _local(value) for name, value in state[parameter].items()}
    for group, held in zip(optimizer.param_groups, groups, strict=True):
        group["params"] = [shards.get(parameter, parameter) for parameter in held]
    try:
        yield
    finally:
        for group, held in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = held
        for parameter, shard in shards.items():
            for name, value in state.pop(shard, {}).items():
                # State that was distributed before the block shares its storage with the shard's
                # state, so it is up to date. Only state that the update has created must be
                # distributed and stored under the parameter.
                if not is_distributed(state[parameter].get(name)):
                    state[parameter][name] = _placed(name, value, parameter)


@torch.no_grad()
def _shard_of(parameter: Tensor) -> Tensor:
    # Detach the shard before setting its `grad`: `to_local` may return the same tensor each time,
    # and other users of that tensor must not see this `grad`.
    shard = local_tensor(parameter).detach()
    if parameter.grad is not None:
        shard.grad = local_tensor(parameter.grad)
    return shard


def _local(value: Any) -> Any:
    return local_tensor(value) if isinstance(value, Tensor) else value


def _placed(name: str, value: Any, parameter: "DTensor") -> Any:
    """Distribute new optimizer state like its parameter; leave the entry ``step`` as it is."""
    if name == "step" or not isinstance(value, Tensor):
        return value
    from torch.distributed.tensor import DTensor  # noqa: PLC0415  (imported already)

    return DTensor.from_local(
        value,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )
