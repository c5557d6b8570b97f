"""Record a step and run it again, to find the first module that computes something non-finite."""

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from mfwrap.tensors.shards import is_distributed
from mfwrap.tensors.wrappers import unwrapped_network

_INDICES = ("indices", "index", "idx")
"""Names under which a batch may hold the indices of its samples in the data set."""


class Origin(NamedTuple):
    """Where in a step the first non-finite value arises."""

    where: str
    """``"input"``, ``"weight"``, ``"activation"``, ``"loss"`` or ``"gradient"``."""

    name: str
    """Name of the module, parameter or input; empty for the network itself."""

    micro_batch: int
    rows: tuple[int, ...] = ()
    """Rows of an input that are non-finite."""

    indices: tuple[int, ...] = ()
    """Indices of the micro-batch's samples in the data set, if the batch contains indices."""


class RandomState(NamedTuple):
    """States of torch's random number generators."""

    host: Tensor
    device: Tensor | None
    """State of the generator on the network's device; ``None`` if that is the CPU."""

    @classmethod
    def now(cls, device: torch.device) -> "RandomState":
        """Return the current states, without synchronizing with the device."""
        on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), on_device)

    def restore(self, device: torch.device) -> None:
        """Set torch's random number generators on the host and on `device` to these states."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


class NetworkInputs(NamedTuple):
    """Inputs of one call of the network in training: references to the tensors, not copies."""

    positional: tuple[Any, ...]
    keywords: Mapping[str, Any]
    random: RandomState
    """Random states at the start of the call."""

    autocast: Callable[[], AbstractContextManager[Any]]
    """Makes an autocast context with the settings of the call."""


@final
class StepRecorder:
    """Keep the inputs of each call of a network, for the current step and the previous step.

    Args:
        network: The network without wrappers; see `inner_network`.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.device = next((p.device for p in network.parameters()), torch.device("cpu"))
        self._this_step: list[NetworkInputs] = []
        self.last_step: list[NetworkInputs] = []
        """Calls of the last completed step, in their order."""
        self.is_on = True
        """Whether calls are recorded."""
        self._handle = network.register_forward_pre_hook(self._record, with_kwargs=True)

    def end_step(self) -> None:
        """Make the current step the last completed step; release the inputs of earlier steps."""
        self.last_step, self._this_step = self._this_step, []

    def close(self) -> None:
        """Stop recording and release all inputs."""
        self._handle.remove()
        self.last_step, self._this_step = [], []

    def _record(
        self, network: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        if self.is_on and network.training and torch.is_grad_enabled():
            state = RandomState.now(self.device)
            autocast = _current_autocast(self.device.type)
            self._this_step.append(NetworkInputs(positional, keywords, state, autocast))


def _current_autocast(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled)


def inner_network(model: nn.Module) -> nn.Module | None:
    """Return the network to record: `model`, without DistributedDataParallel around it.

    Returns:
        ``None`` if the network cannot be recorded: its weights are sharded, so one rank alone
        cannot repeat a call; or it is compiled, and hooks would force a recompilation.
    """
    sharded = any(map(is_distributed, model.parameters()))
    compiled = any(hasattr(module, "_orig_mod") for module in model.modules())
    return None if sharded or compiled else unwrapped_network(model)


def replay_step(recorder: StepRecorder, loss_scale: float) -> Origin | None:
    """Run the forward and backward of the last step again and find the first non-finite value.

    The replay draws the same random numbers as the step. Afterwards, random number generators and
    buffers have the same state as before; gradients do not change. The backward is replayed only
    if the network itself returns the loss. If the loop computes the loss, only the forward is
    checked. Synchronizes with the device.

    Args:
        recorder: Recorder that holds the inputs.
        loss_scale: Factor by which the loss is multiplied before the backward.

    Returns:
        Place of the first non-finite value; ``None`` if all values of the replay are finite.
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
    """Check a micro-batch's inputs, forward and backward; the caller sets ``micro_batch``."""
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
    # The gradients of all module outputs are finite, so the fault is in the gradient of a weight.
    # Search from the last weight to the first, because backward reaches them in this order.
    for name, gradient in reversed(list(zip(weights, gradients, strict=True))):
        if gradient is not None and not gradient.isfinite().all():
            return Origin("gradient", name, 0)
    return None


@final
class _Watch:
    """Find the first module with a non-finite output, or a non-finite gradient of its output."""

    def __init__(self, network: nn.Module) -> None:
        self.origin: Origin | None = None
        self._network = network
        self._handles = contextlib.ExitStack()

    def __enter__(self) -> "_Watch":
        for name, module in self._network.named_modules():
            # Hooks run in the order of their registration. This hook is registered last, so it
            # sees the output after any change by the other hooks: one of them may be at fault.
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
    """Return a non-finite weight of the module as the origin; without one, the module's output."""
    for weight_name, weight in module.named_parameters(recurse=False):
        if not weight.isfinite().all():
            return Origin("weight", f"{name}.{weight_name}" if name else weight_name, 0)
    return Origin("activation" if name else "loss", name, 0)


def _is_bad(tensor: Tensor) -> bool:
    if not tensor.is_floating_point():
        return False
    detached = tensor.detach()
    # Accept -inf in a tensor that does not require a gradient: it may be an attention mask.
    bad = ~detached.isfinite() if tensor.requires_grad else _nan_or_inf(detached)
    return bool(bad.any())


def _nan_or_inf(tensor: Tensor) -> Tensor:
    """Return which elements are NaN or positive infinity; -inf counts as finite."""
    return ~(tensor < float("inf"))


def _by_name(network: nn.Module, inputs: NetworkInputs) -> dict[str, Any]:
    """Return the arguments of a call, keyed by their names in the signature of `forward`."""
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
    """Yield each tensor in nested sequences and mappings, with its dotted key."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _tensors(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for number, item in enumerate(value):
            yield from _tensors(item, f"{name}.{number}".lstrip("."))


def _loss_of(output: Any) -> Tensor | None:
    """Return the loss in the output of a network; ``None`` if the output has no loss."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    is_loss = isinstance(output, Tensor) and output.numel() == 1 and output.is_floating_point()
    return output.reshape(()) if is_loss else None
