"""Find where a finite step first differs from the step before, by running both again."""

import math
import statistics
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, final

import torch
from torch import Tensor, nn

from mfwrap.callbacks.culprit.replay.module_calls import ModuleCall, ModuleCalls, Value
from mfwrap.callbacks.culprit.replay.recorder import (
    RecordedCall,
    StepRecorder,
    loss_of,
    tensors_in,
)
from mfwrap.callbacks.culprit.replay.replay import (
    attempted,
    backward,
    gradients_aside,
    with_aliases,
)
from mfwrap.callbacks.culprit.replay.targets import is_target

_ODD = 6.0
"""Smallest ratio of the sizes of a value in the two steps that is no ordinary difference."""

_ODD_GRADIENT = 8.0
"""As `_ODD`, for gradients, which vary more."""


_TINY = 1e-30
"""Replaces a ratio of 0 where it is divided by."""

_ALONE = 30.0
"""As `_ODD`, for the gradient of a single weight: that of a scalar varies most."""

_CHANGED, _SAME = 0.3, 0.1
"""Smallest change of a gradient, as a share of it, that a hook has made, and the largest one that
rounding explains."""


class Difference(NamedTuple):
    """First value, in the order of the step, whose size differs between the two steps.

    What came before it in the step is ordinary.
    """

    where: Literal["input", "activation", "gradient"]
    name: str
    """Input of the network, module, or weight."""

    ratio: float
    """Ratio of the root mean square in the step to that in the step before; of a hook, the change
    of the gradient that it makes, as a share of the gradient."""

    others: tuple[str, ...] = ()
    """More weights whose gradients are changed by hooks."""

    by_hook: bool = False
    """Whether a hook, on the output of the module or on the weight, changes the gradient in this
    step, and has not done so in the step before."""


def first_difference(recorder: StepRecorder) -> Difference | None:
    """Run the last step and the step before again, and compare the sizes of their values.

    Both have the present weights. Root mean squares are compared of the inputs, of what each module
    receives and returns, of the gradients of both, and of the weights' gradients. Besides, hooks
    are looked for that change gradients in this step alone: the gradient of a module's output is
    seen before and after its hooks, and the gradient of a linear layer's weight is computed once
    more from what the layer has received. Synchronizes with the device, starts no collective, and
    never raises an error of the network.

    Returns:
        ``None`` if nothing differs, if the first gradient of all does, which is that of the loss,
        or if a step cannot be run again.
    """
    steps = recorder.last_step, recorder.earlier_step
    sizes = attempted(recorder, lambda: [_sizes_of(recorder, each) for each in steps], None)
    return (_hooked(*sizes) or _compared(*sizes)) if sizes else None


def _compared(now: "_Sizes", before: "_Sizes") -> Difference | None:
    ratios = {key: _ratio(sizes, before[key]) for key, sizes in now.items() if key in before}
    for key, ratio in ratios.items():
        if key.what == "input" and _is_odd(ratio, _ODD):
            return Difference("input", key.name, ratio)
    for key, ratio in ratios.items():
        # An embedding receives numbers of tokens, which have no size: its output is that of them.
        received = ratios.get(key._replace(what="received"))
        if key.what == "returned" and _is_odd(ratio, _ODD):
            if received is None or _is_odd(received, _ODD / 2):
                return None
            return Difference("activation", key.name, ratio)
    last: float | None = None
    for key, ratio in ratios.items():
        if key.what.startswith("gradient"):
            # A gradient of an output comes from what is behind it in the order of the forward.
            of_output = key._replace(what="gradient of output")
            behind = last if key == of_output else ratios.get(of_output)
            last = ratio
            if _is_odd(ratio, _ODD_GRADIENT):
                # Inputs may make gradients vanish, such as those of attention to equal tokens.
                if ratio < 1:
                    return None
                is_made_here = behind is not None and behind > 0 and _is_odd(ratio / behind, _ODD)
                return Difference("gradient", key.name, ratio) if is_made_here else None
    odd = [key for key, ratio in ratios.items() if key.what == "weight" and ratio > _ALONE]
    return Difference("gradient", odd[0].name, ratios[odd[0]]) if len(odd) == 1 else None


def _hooked(now: "_Sizes", before: "_Sizes") -> Difference | None:
    """Return the gradients that hooks change in this step, and have not changed before."""
    for what in ("change of output", "change of weight"):
        changed = {
            key.name: max(sizes)
            for key, sizes in now.items()
            if key.what == what and max(sizes) > _CHANGED and max(before.get(key, [1.0])) < _SAME
        }
        if changed:
            name, *others = changed
            # Behind a changed gradient of an output, all gradients are others.
            more = (*others, *_risen(now, before)) if what == "change of weight" else ()
            return Difference("gradient", name, changed[name], more, by_hook=True)
    return None


def _risen(now: "_Sizes", before: "_Sizes") -> list[str]:
    """Return the weights of other layers than linear ones whose gradients are others."""
    return [
        key.name
        for key, sizes in now.items()
        if key.what == "weight"
        and key._replace(what="change of weight") not in now
        and _is_odd(_ratio(sizes, before.get(key, sizes)), _ODD_GRADIENT)
    ]


def _ratio(now: Sequence[float], before: Sequence[float]) -> float:
    """Return the ratio of a micro-batch to the mean of the step before: the one farthest from 1."""
    usual = statistics.fmean(before)
    # What is infinite may be a mask.
    known = [size / usual for size in now if size < math.inf and 0 < usual < math.inf]
    return max(known, key=lambda ratio: max(ratio, 1 / max(ratio, _TINY)), default=1.0)


def _is_odd(ratio: float, limit: float) -> bool:
    return not 1 / limit <= ratio <= limit


_Sizes = dict[Value, list[float]]
"""Root mean square in each micro-batch, in the order of the step."""


def _sizes_of(recorder: StepRecorder, calls: Sequence[RecordedCall]) -> _Sizes:
    found: _Sizes = {}
    network = recorder.network
    for call in calls:
        sizes: dict[Value, Tensor] = {}
        for name, tensor in tensors_in(call.arguments):
            if tensor.is_floating_point() and not is_target(name, tensor):
                sizes[Value("input", name)] = _size([tensor])
        with (
            _Meter(network, sizes) as meter,
            gradients_aside(network) as weights,
            torch.enable_grad(),
        ):
            loss = loss_of(call.run(recorder))
            if loss is not None and loss.requires_grad:
                seed = call.loss_gradient
                seed = torch.ones_like(loss) if seed is None else seed
                backward([loss], [seed], weights.values())
            for name, weight in weights.items():
                if weight.grad is not None:
                    sizes[Value("weight", name)] = _size([weight.grad])
                    if name in meter.products:
                        key = Value("change of weight", name)
                        sizes[key] = _share(meter.products[name], weight.grad)
        numbers = torch.stack([size.to(recorder.device) for size in sizes.values()]).tolist()
        for key, number in zip(sizes, numbers, strict=True):
            found.setdefault(key, []).append(number)
    return found


def _size(tensors: Sequence[Tensor]) -> Tensor:
    """Return the root mean square of tensors, shape ``()``, float32."""
    squares = [tensor.detach().float().square().mean() for tensor in tensors if tensor.numel()]
    return torch.stack(squares).mean().sqrt() if squares else torch.zeros(())


def _share(before: Tensor, after: Tensor) -> Tensor:
    """Return by how much a gradient was changed, as a share of it, shape ``()``, float32."""
    before, after = before.detach().float(), after.detach().float()
    change: Tensor = torch.linalg.vector_norm(after - before)
    size: Tensor = torch.linalg.vector_norm(before)
    return change / size.clamp(min=torch.finfo(torch.float32).tiny)


@final
class _Meter(ModuleCalls):
    """Measure what each module receives and returns, and the gradients of both.

    Args:
        network: Network that is called within the block.
        sizes: Gets the root mean squares, in the order of the step.
    """

    def __init__(self, network: nn.Module, sizes: dict[Value, Tensor]) -> None:
        self._sizes = sizes
        # The gradient of a weight that two modules use is that of both, in each step.
        self._linear = {
            name: f"{name}.weight"
            for name, module in network.named_modules()
            if type(module) is nn.Linear
        }
        self.products: dict[str, Tensor] = {}
        """Gradients of weights of linear layers, computed from what these have received."""
        super().__init__(each for each in network.named_modules() if each[0])

    def received(self, call: ModuleCall, arguments: Any) -> Any:
        self._measure(call.value("received"), arguments)
        of_input = call.value("gradient of input")
        return with_aliases(arguments, lambda one: self._measure_gradient(one, of_input))

    def made(self, call: ModuleCall, inputs: tuple[Any, ...], output: Any) -> None:
        for _, tensor in tensors_in(output):
            # A tensor that was made in no operation has no gradient of its own.
            if tensor.grad_fn is not None:
                self._compare(tensor, call.value("change of output"))
                if call.name in self._linear and inputs:
                    self._multiply(tensor, inputs[0].detach(), self._linear[call.name])

    def returned(self, call: ModuleCall, output: Any) -> None:
        self._measure(call.value("returned"), output)
        for _, tensor in tensors_in(output):
            # The gradient of a loss that a module inside of the network returns is its factor.
            if tensor.requires_grad and tensor.numel() > 1:
                self._measure_gradient(tensor, call.value("gradient of output"))

    def _compare(self, tensor: Tensor, value: Value) -> None:
        """Compare the gradient of an output after all hooks on it with that before."""
        early: list[Tensor] = []

        def compare(gradient: Tensor | None) -> None:
            if early and gradient is not None:
                self._sizes[value] = _share(early.pop(), gradient)

        self.follow(tensor, early.append)
        self.follow_made(tensor, compare)

    def _multiply(self, tensor: Tensor, received: Tensor, name: str) -> None:
        """Compute the gradient of a linear layer's weight from that of its output."""

        def multiply(gradient: Tensor | None) -> None:
            if gradient is None:
                return
            of_rows = gradient.reshape(-1, gradient.shape[-1]).float()
            product = of_rows.T @ received.reshape(-1, received.shape[-1]).float()
            known = self.products.get(name)
            self.products[name] = product if known is None else known + product

        self.follow_made(tensor, multiply)

    def _measure(self, value: Value, found: Any) -> None:
        # The only element of a tensor is that of a loss, which the finder compares itself.
        tensors = [
            one for _, one in tensors_in(found) if one.is_floating_point() and one.numel() > 1
        ]
        if tensors:
            self._sizes[value] = _size(tensors)

    def _measure_gradient(self, tensor: Tensor, value: Value) -> None:
        def measure(gradient: Tensor) -> None:
            size = _size([gradient])
            known = self._sizes.get(value)
            self._sizes[value] = size if known is None else torch.maximum(known, size)

        self.follow(tensor, measure)
