"""A step done again, to see where something that is not finite arises first."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from mfwrap.callbacks.culprit.recorder import NetworkInputs, RandomState, StepRecorder

__all__ = ["Origin", "replay_step"]

_INDICES = ("indices", "index", "idx")
"""Under these names a batch may hold the indices of its samples in the data set."""


class Origin(NamedTuple):
    """Where in a step something that is not finite arises first."""

    where: str
    """``"input"``, ``"weight"``, ``"activation"``, ``"loss"`` or ``"gradient"``."""

    name: str
    """Of the module, of the parameter, or of the network's input; empty for the network."""

    micro_batch: int
    rows: tuple[int, ...] = ()
    indices: tuple[int, ...] = ()


def replay_step(recorder: StepRecorder, loss_scale: float) -> Origin | None:
    """Do the forward and backward of the last step again and watch every module.

    The random numbers are those of the step. Gradients, buffers and generators are afterwards what
    they were. The loss is the network's own: where the loop computes it outside of the network,
    only the forward is watched. Waits for the device.

    Args:
        recorder: Holds the inputs.
        loss_scale: What the loss is multiplied by.

    Returns:
        ``None`` if everything is finite this time.
    """
    network = recorder.network
    now = RandomState.now(recorder.device)
    buffers = [(buffer, buffer.detach().clone()) for buffer in network.buffers()]
    recorder.is_on = False
    try:
        for number, inputs in enumerate(recorder.last_step):
            inputs.random.restore(recorder.device)
            origin = _replay_micro_batch(network, inputs, loss_scale)
            if origin is not None:
                return origin._replace(micro_batch=number, indices=_indices(network, inputs))
        return None
    finally:
        recorder.is_on = True
        now.restore(recorder.device)
        with torch.no_grad():
            for buffer, content in buffers:
                buffer.copy_(content)


def _replay_micro_batch(
    network: nn.Module, inputs: NetworkInputs, loss_scale: float
) -> Origin | None:
    origin = _bad_input(network, inputs)
    if origin is not None:
        return origin
    with _Watch(network) as watch, torch.enable_grad():
        with inputs.autocast():
            output = network(*inputs.positional, **inputs.keywords)
        loss = _loss_of(output)
        if watch.origin is not None or loss is None or not loss.requires_grad:
            return watch.origin
        if not loss.isfinite():
            return Origin("loss", "", 0)
        weights = {n: p for n, p in network.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(
            loss.float() * loss_scale, list(weights.values()), allow_unused=True
        )
        if watch.origin is not None:
            return watch.origin
    # Behind the last module that it reached, backward meets weights in the reverse order.
    for name, gradient in reversed(list(zip(weights, gradients, strict=True))):
        if gradient is not None and not gradient.isfinite().all():
            return Origin("gradient", name, 0)
    return None


@final
class _Watch:
    """Note the first module whose output, or the gradient of whose output, is not finite."""

    def __init__(self, network: nn.Module) -> None:
        self.origin: Origin | None = None
        self._network = network
        self._handles = contextlib.ExitStack()

    def __enter__(self) -> "_Watch":
        for name, module in self._network.named_modules():
            # Before hooks of others none, behind them ours: they may be what is at fault.
            handle = module.register_forward_hook(self._watch_output(name))
            self._handles.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        self._handles.close()

    def _watch_output(self, name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, _: Any, output: Any) -> None:
            for _, tensor in _tensors(output):
                if self.origin is None and _is_bad(tensor):
                    self.origin = _origin_in(module, name)
                if tensor.requires_grad and name:
                    handle = tensor.register_hook(lambda gradient: self._look_at(name, gradient))
                    self._handles.callback(handle.remove)

        return look

    def _look_at(self, name: str, gradient: Tensor) -> None:
        if self.origin is None and not gradient.isfinite().all():
            self.origin = Origin("gradient", name, 0)


def _origin_in(module: nn.Module, name: str) -> Origin:
    for weight_name, weight in module.named_parameters(recurse=False):
        if not weight.isfinite().all():
            return Origin("weight", f"{name}.{weight_name}" if name else weight_name, 0)
    return Origin("activation" if name else "loss", name, 0)


def _is_bad(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return False
    detached = tensor.detach()
    # What no gradient passes may be a mask, in which -inf is no fault.
    bad = ~detached.isfinite() if tensor.requires_grad else _nan_or_inf(detached)
    return bool(bad.any())


def _nan_or_inf(tensor: Tensor) -> Tensor:
    return ~(tensor < float("inf"))


def _by_name(network: nn.Module, inputs: NetworkInputs) -> dict[str, Any]:
    """Return the arguments of a call by the names that the network's forward has for them."""
    names = list(inspect.signature(network.forward).parameters)
    names += [str(number) for number in range(len(names), len(inputs.positional))]
    positional = zip(names, inputs.positional, strict=False)
    return {**dict(positional), **inputs.keywords}


def _bad_input(network: nn.Module, inputs: NetworkInputs) -> Origin | None:
    for name, tensor in _tensors(_by_name(network, inputs)):
        if not tensor.is_floating_point():
            continue
        bad = _nan_or_inf(tensor.detach())
        if bad.any():
            rows = bad.reshape(len(bad), -1).any(dim=1).tolist() if bad.dim() else []
            numbers = tuple(number for number, is_bad in enumerate(rows) if is_bad)
            return Origin("input", name, 0, rows=numbers)
    return None


def _indices(network: nn.Module, inputs: NetworkInputs) -> tuple[int, ...]:
    for name, tensor in _tensors(_by_name(network, inputs)):
        if name.rpartition(".")[2] in _INDICES and not tensor.is_floating_point():
            return tuple(tensor.reshape(-1).tolist())
    return ()


def _tensors(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors in nested sequences and mappings, with their keys."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for number, item in enumerate(value):
            yield from _tensors(item, f"{name}.{number}".lstrip("."))


def _loss_of(output: Any) -> Tensor | None:
    """Return the loss in what a network returns; ``None`` if it returns something else."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    is_loss = isinstance(output, Tensor) and output.numel() == 1 and output.is_floating_point()
    return output.reshape(()) if is_loss else None
