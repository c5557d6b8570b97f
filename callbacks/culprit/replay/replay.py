"""Record a step and run it again, to find the first module that computes something non-finite."""

import contextlib
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from mfwrap.callbacks.culprit.replay.batch_rows import IGNORED, is_target
from mfwrap.callbacks.culprit.replay.recorder import (
    RandomState,
    RecordedCall,
    StepRecorder,
    arguments_of,
    indices_of,
    loss_of,
    tensors_in,
)
from mfwrap.compatibility.torch import post_accumulate_hooks
from mfwrap.tensors.module_hooks import keep_out_of_copies


class Origin(NamedTuple):
    """Where in a step the first non-finite value arises."""

    where: str
    """``"input"``, ``"targets"`` (a micro-batch without targets), ``"weight"``, ``"weights"`` (most
    weights are non-finite), ``"activation"``, ``"loss"`` or ``"gradient"``."""

    name: str
    """Name of the module, parameter or input; empty for the network itself."""

    micro_batch: int
    rows: tuple[int, ...] = ()
    """Rows of an input that are non-finite."""

    indices: tuple[int, ...] = ()
    """Indices of the micro-batch's samples in the data set, if the batch contains indices."""


def replay_step(recorder: StepRecorder, loss_scale: float) -> Origin | None:
    """Run the forward and backward of the last step again and find the first non-finite value.

    The replay draws the same random numbers as the step. Afterwards, random number generators,
    buffers and gradients are as before. The backward is replayed only if the network itself returns
    the loss; `outside_of_replay` tells. Synchronizes with the device.

    Args:
        recorder: Recorder that holds the inputs.
        loss_scale: Factor by which the loss is multiplied before the backward, for calls whose
            ``loss_gradient`` is unknown.

    Returns:
        Place of the first non-finite value; ``None`` if all values of the replay are finite.
    """
    network = recorder.network
    with undisturbed(recorder):
        for number, inputs in enumerate(recorder.last_step):
            inputs.random.restore(recorder.device)
            origin = _replay_micro_batch(network, inputs, loss_scale)
            if origin is not None:
                return origin._replace(micro_batch=number, indices=indices_of(network, inputs))
    return None


@contextlib.contextmanager
def undisturbed(recorder: StepRecorder) -> Iterator[None]:
    """Call the network within the block; then restore random states and buffers.

    The recorder does not record these calls.
    """
    now = RandomState.now(recorder.device)
    buffers = [(buffer, buffer.detach().clone()) for buffer in recorder.network.buffers()]
    recorder.is_on = False
    try:
        yield
    finally:
        recorder.is_on = True
        now.restore(recorder.device)
        with torch.no_grad():
            for buffer, content in buffers:
                buffer.copy_(content)


def _replay_micro_batch(
    network: nn.Module, inputs: RecordedCall, loss_scale: float
) -> Origin | None:
    """Check a micro-batch's inputs, forward and backward; the caller sets ``micro_batch``."""
    origin = _bad_input(network, inputs)
    if origin is not None:
        return origin
    with _Watch(network) as watch, gradients_aside(network) as weights, torch.enable_grad():
        with inputs.autocast():
            output = network(*inputs.positional, **inputs.keywords)
        loss = loss_of(output)
        if watch.origin is not None and watch.origin.where == "loss":
            return origin_of_loss(network, inputs)
        if watch.origin is None and loss is not None and loss.requires_grad:
            seed = inputs.loss_gradient
            if seed is None:
                (loss.float() * loss_scale).sum().backward()
            elif seed.isfinite().all():
                loss.backward(seed)
        if watch.origin is not None:
            return watch.origin
        # The gradients of all module outputs are finite, so the fault is in the gradient of a
        # weight. Search from the last weight to the first: backward reaches them in this order.
        for name, weight in reversed(weights.items()):
            if weight.grad is not None and not weight.grad.isfinite().all():
                return Origin("gradient", name, 0)
    return None


@contextlib.contextmanager
def gradients_aside(network: nn.Module) -> Iterator[dict[str, nn.Parameter]]:
    """Let a backward write to empty gradients, without the hooks that act on whole gradients.

    The replay calls ``backward`` as the step did: `torch.autograd.grad` raises an error for
    networks with reentrant checkpointing. Hooks that run after the accumulation of a gradient may
    update weights or start a collective; a replay must do neither. DistributedDataParallel's own
    hooks ignore a backward that no forward of the wrapper has announced.
    """
    weights = {name: p for name, p in network.named_parameters() if p.requires_grad}
    gradients = [weight.grad for weight in weights.values()]
    hooks = [post_accumulate_hooks(weight) for weight in weights.values()]
    lifted = [dict(hook) for hook in hooks]
    for weight, hook in zip(weights.values(), hooks, strict=True):
        weight.grad = None
        hook.clear()
    try:
        yield weights
    finally:
        entries = zip(weights.values(), gradients, hooks, lifted, strict=True)
        for weight, gradient, hook, content in entries:
            weight.grad = gradient
            hook.update(content)


@final
class _Watch:
    """Find the first module with a non-finite output, or a non-finite gradient of its output.

    NaN and +inf are faults. -inf alone may be a mask, as in attention scores before a softmax. It
    is a fault only if it goes on: a module that receives the -inf, or contains the module at fault,
    returns NaN or +inf, or the loss is -inf.
    """

    def __init__(self, network: nn.Module) -> None:
        self.origin: Origin | None = None
        self._network = network
        self._handles = contextlib.ExitStack()
        self._masks: dict[str, nn.Module] = {}
        """Modules whose output holds -inf that has not yet turned out to be a mask."""

        self._received: list[tuple[bool, bool]] = []
        """For each running module: whether its inputs hold NaN or +inf, and whether -inf."""

    def __enter__(self) -> "_Watch":
        for name, module in self._network.named_modules():
            before = module.register_forward_pre_hook(self._look_at_inputs, with_kwargs=True)
            self._handles.callback(before.remove)
            # Hooks run in the order of their registration. This hook is registered last, so it
            # sees the output after any change by the other hooks: one of them may be at fault.
            handle = module.register_forward_hook(self._watch_output(name))
            self._handles.callback(handle.remove)
            keep_out_of_copies(module, before, handle)
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.close()

    def _look_at_inputs(
        self, _: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        # Before the call: an operation in place may overwrite the input with its output.
        self._received.append(_non_finite((positional, keywords)))

    def _watch_output(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, _: Any, output: Any) -> None:
            received = self._received.pop()
            if self.origin is None:
                self._judge(module, name, output, received)
            for _, tensor in tensors_in(output):
                if tensor.requires_grad and name:
                    handle = tensor.register_hook(lambda gradient: self._look_at(name, gradient))
                    self._handles.callback(handle.remove)

        return look

    def _judge(
        self, module: nn.Module, name: str, output: Any, received: tuple[bool, bool]
    ) -> None:
        has_nan, has_minus_inf = _non_finite(output)
        if not name:
            # The loss decides: a network may return logits that are masked with -inf.
            loss = loss_of(output)
            has_nan = has_nan or (loss is not None and not loss.isfinite())
        inside = [mask for mask in self._masks if not name or mask.startswith(f"{name}.")]
        if has_nan:
            if inside or (self._masks and any(received)):
                self._blame_mask(name, sure=received == (False, True))
            else:
                self.origin = _origin_in(self._network, module, name)
        elif has_minus_inf and name:
            self._masks[name] = module
        elif received[1]:
            self._masks.clear()
        else:
            for mask in inside:
                del self._masks[mask]

    def _blame_mask(self, name: str, *, sure: bool) -> None:
        """Blame the module that returned -inf, or what contains it and the module `name`.

        Args:
            name: Module that returned NaN or +inf.
            sure: Whether this module received the -inf itself. Otherwise an operation between the
                two modules may be at fault, in the module that contains both.
        """
        mask, module = next(iter(self._masks.items()))
        if not sure:
            mask = _common_module(mask, name)
            module = self._network.get_submodule(mask)
        self.origin = _origin_in(self._network, module, mask)

    def _look_at(self, name: str, gradient: Tensor) -> None:
        if self.origin is None and not gradient.isfinite().all():
            self.origin = Origin("gradient", name, 0)


def _common_module(first: str, second: str) -> str:
    """Return the name of the innermost module that contains both modules."""
    pairs = zip(first.split("."), second.split("."), strict=False)
    return ".".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _origin_in(network: nn.Module, module: nn.Module, name: str) -> Origin:
    """Return a non-finite weight of the module as the origin; without one, the module's output."""
    for weight_name, weight in module.named_parameters(recurse=False):
        if not weight.isfinite().all():
            weights = list(network.parameters())
            num_bad = sum(not bool(each.isfinite().all()) for each in weights)
            if num_bad > max(1, len(weights) // 2):
                # An update has ruined most weights. The first of them is not the culprit.
                return Origin("weights", "", 0)
            return Origin("weight", f"{name}.{weight_name}" if name else weight_name, 0)
    return Origin("activation" if name else "loss", name, 0)


def origin_of_loss(network: nn.Module, inputs: RecordedCall) -> Origin:
    """Return the origin of a non-finite loss of a call: targets that are all ignored, or the loss.

    Synchronizes with the device.
    """
    for name, tensor in tensors_in(arguments_of(network, inputs.positional, inputs.keywords)):
        if is_target(name, tensor) and bool((tensor == IGNORED).all()):
            return Origin("targets", name, 0)
    return Origin("loss", "", 0)


def _non_finite(value: Any) -> tuple[bool, bool]:
    """Tell whether tensors in `value` hold NaN or +inf, and whether they hold -inf.

    A tensor without a gradient may hold -inf: it is an ordinary mask.
    """
    tensors = [tensor for _, tensor in tensors_in(value) if tensor.is_floating_point()]
    has_nan = any(bool(_nan_or_inf(tensor.detach()).any()) for tensor in tensors)
    has_minus_inf = any(
        bool((tensor.detach() == -float("inf")).any()) for tensor in tensors if tensor.requires_grad
    )
    return has_nan, has_minus_inf


def _nan_or_inf(tensor: Tensor) -> Tensor:
    """Return which elements are NaN or positive infinity; -inf counts as finite."""
    return ~(tensor < float("inf"))


def _bad_input(network: nn.Module, inputs: RecordedCall) -> Origin | None:
    for name, tensor in tensors_in(arguments_of(network, inputs.positional, inputs.keywords)):
        if not tensor.is_floating_point():
            continue
        bad = _nan_or_inf(tensor.detach())
        if bad.any():
            rows = bad.reshape(len(bad), -1).any(dim=1).tolist() if bad.dim() else []
            numbers = tuple(number for number, is_bad in enumerate(rows) if is_bad)
            return Origin("input", name, 0, rows=numbers)
    return None
