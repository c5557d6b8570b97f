"""Record the calls of a network in a step, so that the step can be replayed."""

import contextlib
import copy
import inspect
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from mfwrap.callbacks.culprit.replay.targets import IGNORED, is_target
from mfwrap.tensors.module_hooks import keep_out_of_copies
from mfwrap.tensors.norms import norms_of_each
from mfwrap.tensors.shards import is_distributed, local_tensors
from mfwrap.tensors.training_forwards import is_training_forward, replay
from mfwrap.tensors.wrappers import unwrapped_network

_INDICES = ("indices", "index", "idx")
"""Names under which a batch may hold the indices of its samples in the data set."""


_MOST_BYTES = 2**26
"""Largest size of the columns of a micro-batch that are kept beside the inputs of the network."""


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

    def differs_from(self, other: "RandomState") -> bool:
        """Tell whether random numbers were drawn between two states of the same generators."""
        pairs = zip(self, other, strict=True)
        return any(a is not None and b is not None and not torch.equal(a, b) for a, b in pairs)

    def restore(self, device: torch.device) -> None:
        """Set torch's random number generators on the host and on `device` to these states."""
        torch.set_rng_state(self.host)
        if self.device is not None:
            torch.cuda.set_rng_state(self.device, device)


@dataclass(slots=True)
class RecordedCall:
    """One call of the network in training: references to the inputs, and the loss it returned.

    The containers of the inputs are copies, so the forward may take items out of its own.
    """

    positional: tuple[Any, ...]
    keywords: Mapping[str, Any]
    forward: Callable[..., Any]
    """What the call ran: the network's ``forward``, or what a loop had put in its place."""

    random: RandomState
    """Random states at the start of the call."""

    autocast: Callable[[], AbstractContextManager[Any]]
    """Makes an autocast context with the settings of the call."""

    step: int = 0
    """Number of steps that were recorded before this one."""

    loss: Tensor | None = None
    """Copy of the loss that the network returned, shape ``()``; ``None`` if it returned none."""

    loss_gradient: Tensor | None = None
    """Gradient that the step's backward passed to this loss: the loss scale and all factors of the
    loop. ``None`` if the backward did not reach the loss."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The inputs by the names of the arguments."""
        return arguments_of(self.forward, self.positional, self.keywords)

    def run(self, recorder: "StepRecorder") -> Any:
        """Call the network again, with the forward, random states and autocast of the call.

        What watches the forward passes of the training ignores this call. A backward of the output
        ends at the inputs: it changes no gradient of theirs, and does not enter the graph that has
        computed them.

        Args:
            recorder: Recorder of the network.
        """
        self.random.restore(recorder.device)
        positional, keywords = replaced((self.positional, self.keywords), _cut)
        with self.autocast(), replay(), self._forward_of(recorder.network):
            return recorder.network(*positional, **keywords)

    @contextlib.contextmanager
    def _forward_of(self, network: nn.Module) -> Iterator[None]:
        """Give the network the forward of the call within the block.

        A Trainer of TRL computes a loss inside of the network's call: it replaces the forward for
        one call, whose arguments are those of the loss.
        """
        own, is_same = vars(network), network.forward == self.forward
        before = own.get("forward")
        if not is_same:
            own["forward"] = self.forward
        try:
            yield
        finally:
            if not is_same:
                own.pop("forward", None)
                own.update({} if before is None else {"forward": before})

    def keep_gradient(self, gradient: Tensor | None) -> None:
        """Keep the gradient of the loss; a hook of the loss calls this in the backward.

        Args:
            gradient: The gradient. It is ``None`` if DistributedDataParallel has joined all outputs
                and the loop uses only another one.
        """
        if gradient is not None:
            self.loss_gradient = gradient.detach()


class RecordedBatch(RecordedCall):
    """A micro-batch whose loss is computed outside of the network, by its Trainer.

    ``keywords`` is the micro-batch. A call of it computes the loss without gradients.
    """

    @property
    def arguments(self) -> dict[str, Any]:
        """The columns of the micro-batch."""
        return dict(self.keywords)

    def run(self, recorder: "StepRecorder") -> Any:
        """Compute the loss again, by ``run_batch`` of the recorder."""
        if recorder.run_batch is None:
            return {}
        self.random.restore(recorder.device)
        # The loss may take columns out of its batch.
        batch = replaced(self.keywords, lambda tensor: tensor)
        return {"loss": recorder.run_batch(batch)}


@final
class StepRecorder:
    """Keep inputs and loss of each call of a network, for the current and the last two steps.

    Costs one copy of a scalar for each call, and no host-device synchronization. Calls that a CUDA
    graph captures are not recorded: a replay could not repeat them.

    Args:
        network: The network without wrappers; see `inner_network`.
    """

    def __init__(self, network: nn.Module) -> None:
        self.network = network
        self.device = next((p.device for p in network.parameters()), torch.device("cpu"))
        self._this_step: list[RecordedCall] = []
        self._num_steps = 0
        self._begins_with_gradients = False
        self.began_with_gradients = False
        """Whether weights had gradients before the first call of the last completed step."""
        self._second_gradients: dict[Tensor, Tensor] = {}
        self.second_gradients: dict[Tensor, Tensor] = {}
        """Norm of each gradient, shape ``()``, with which the first backward of the second step has
        begun, if that is the last completed step. It is zero if the loop has zeroed them."""
        self.last_step: list[RecordedCall] = []
        """Calls of the last completed step, in their order."""
        self.earlier_step: list[RecordedCall] = []
        """Calls of the step before the last completed one."""
        self._losses: list[Tensor] = []
        self.last_losses: list[Tensor] = []
        """Loss of each micro-batch of the last completed step, from `note_loss`."""
        self._columns: list[dict[str, Tensor]] = []
        self.last_columns: list[dict[str, Tensor]] = []
        """Whether each row is finite, shape ``(B,)``, bool, in the columns that `note_batch` has
        found in each micro-batch of the last completed step."""
        self._targets: list[dict[str, Tensor]] = []
        self.last_targets: list[dict[str, Tensor]] = []
        """As `last_columns`, of columns of targets: whether any is to be predicted, shape ``()``,
        bool."""
        self._batches: list[RecordedBatch] = []
        self.last_batches: list[RecordedBatch] = []
        """Micro-batches of the last completed step, each whole; empty without `run_batch`."""
        self.run_batch: Callable[[Mapping[str, Any]], Tensor] | None = None
        """Computes the loss of a micro-batch that is computed outside of the network; ``None`` if
        that is not known to be possible. It may not change anything, nor start a collective."""
        self.holder: object | None = None
        """What calls the network and may hold other models, such as its Trainer; ``None`` if it is
        unknown."""
        self._num_noted: dict[str, int] = {}
        self._num_bad: dict[str, Tensor] = {}
        self.is_on = True
        """Whether calls are recorded."""
        self._handles = (
            network.register_forward_pre_hook(self.record, with_kwargs=True),
            network.register_forward_hook(self._record_loss),
        )
        keep_out_of_copies(network, *self._handles)

    def end_step(self) -> None:
        """Make the current step the last completed step; release the inputs of earlier steps."""
        self.earlier_step, self.last_step = self.last_step, self._this_step
        self.began_with_gradients = bool(self._this_step) and self._begins_with_gradients
        self.second_gradients, self._second_gradients = self._second_gradients, {}
        self._this_step = []
        for name, are_finite in (pair for each in self.last_columns for pair in each.items()):
            self._num_noted[name] = self._num_noted.get(name, 0) + 1
            self._num_bad[name] = self._num_bad.get(name, 0) + ~are_finite.all()
        # A number of a micro-batch counts all of them.
        are_all = len(self._batches) == len(self._columns)
        self.last_batches, self._batches = self._batches if are_all else [], []
        self.last_columns, self._columns = self._columns, []
        self.last_targets, self._targets = self._targets, []
        self.last_losses, self._losses = self._losses, []
        self._num_steps += 1

    def note_batch(self, batch: Mapping[str, Any] | Sequence[Any]) -> None:
        """Note which rows of a micro-batch are finite in columns that the network did not get.

        A loss that is computed outside of the network may use them, such as targets, or the logits
        of a teacher. Call it after the forward of each micro-batch. Reads each such column once,
        and does not synchronize with the device.
        """
        if not (self.is_on and self._this_step):
            return
        call = self._this_step[-1]
        got = {tensor.data_ptr() for _, tensor in tensors_in([call.positional, call.keywords])}
        others = [
            (name, tensor.detach())
            for name, tensor in tensors_in(batch)
            if tensor.dim() > 0 and tensor.data_ptr() not in got and not is_distributed(tensor)
        ]
        self._columns.append(
            {
                name: tensor.flatten(1).sum(1, dtype=torch.float32).isfinite()
                if tensor.dim() > 1
                else tensor.isfinite()
                for name, tensor in others
                if tensor.is_floating_point()
            }
        )
        if self.run_batch is not None and isinstance(batch, Mapping):
            self._keep(batch, sum(tensor.nbytes for _, tensor in others))
        self._targets.append(
            {name: (tensor != IGNORED).any() for name, tensor in others if is_target(name, tensor)}
        )

    def _keep(self, batch: Mapping[str, Any], num_bytes: int) -> None:
        """Keep a micro-batch, unless what the network did not get takes too much memory."""
        if num_bytes > _MOST_BYTES:
            return
        call = self._this_step[-1]
        whole = replaced(dict(batch), lambda tensor: tensor)
        kept = RecordedBatch((), whole, call.forward, call.random, call.autocast, self._num_steps)
        self._batches.append(kept)

    def note_loss(self, loss: Tensor) -> None:
        """Note the loss of a micro-batch, which may be computed outside of the network.

        Does not synchronize with the device.
        """
        if self.is_on and self._this_step:
            self._losses.append(loss.detach())

    def is_often_bad(self, column: str) -> bool:
        """Tell whether a column was not finite before in a quarter of all micro-batches, or more.

        A mask, for example, is infinite on purpose. Synchronizes with the device.
        """
        number = self._num_noted.get(column, 0)
        return number > 0 and 4 * int(self._num_bad[column]) >= number

    def close(self) -> None:
        """Stop recording and release all inputs."""
        for handle in self._handles:
            handle.remove()
        self.holder = self.run_batch = None
        self.second_gradients, self._second_gradients = {}, {}
        self.last_batches, self._batches = [], []
        self.earlier_step, self.last_step, self._this_step = [], [], []
        self.last_columns, self._columns = [], []
        self.last_targets, self._targets = [], []
        self.last_losses, self._losses = [], []

    def record(
        self, network: nn.Module, positional: tuple[Any, ...], keywords: dict[str, Any]
    ) -> None:
        """Record a call of the network that begins now."""
        if self.records(network):
            if not self._this_step:
                self._begins_with_gradients = any(
                    weight.requires_grad and weight.grad is not None
                    for weight in network.parameters()
                )
            state = RandomState.now(self.device)
            autocast = _current_autocast(self.device.type)
            positional, keywords = replaced((positional, keywords), lambda tensor: tensor)
            call = RecordedCall(
                positional, keywords, network.forward, state, autocast, self._num_steps
            )
            self._this_step.append(call)

    def records(self, network: nn.Module) -> bool:
        """Return whether a call of the network that begins now is recorded."""
        if not (self.is_on and is_training_forward(network)):
            return False
        # A replay of a graph calls no hook, so a call that is captured stands for no step. Besides,
        # the state of the generator cannot be read in a capture.
        return self.device.type != "cuda" or not torch.cuda.is_current_stream_capturing()

    def _record_loss(self, network: nn.Module, _: Any, output: Any) -> None:
        loss = loss_of(output)
        if self.records(network) and loss is not None and self._this_step:
            call = self._this_step[-1]
            # The loop may divide the loss in place, so keep a copy.
            call.loss = loss.detach().clone().reshape(())
            if loss.requires_grad:
                loss.register_hook(call.keep_gradient)
            if loss.requires_grad and self._num_steps == 1 and len(self._this_step) == 1:
                # A loop may zero the gradients as late as just before the backward.
                loss.register_hook(self._keep_norms)

    def _keep_norms(self, _: Tensor | None) -> None:
        kept = {one: one.grad for one in self.network.parameters() if one.grad is not None}
        if kept:
            gradients = [one.detach() for one in local_tensors(kept.values())]
            norms = norms_of_each(gradients, self.device)
            self._second_gradients = dict(zip(kept, norms, strict=True))

    @property
    def first_call(self) -> RecordedCall | None:
        """The first call of the current step, while it is the only one and calls are recorded."""
        return self._this_step[0] if self.is_on and len(self._this_step) == 1 else None


def _current_autocast(device_type: str) -> Callable[[], AbstractContextManager[Any]]:
    enabled = torch.is_autocast_enabled(device_type)
    dtype = torch.get_autocast_dtype(device_type)
    return lambda: torch.autocast(device_type, dtype=dtype, enabled=enabled)


def inner_network(model: nn.Module) -> nn.Module | None:
    """Return the network to record: `model`, without DistributedDataParallel around it.

    Returns:
        ``None`` if the network cannot be recorded: its weights are sharded or it holds a
        ``SyncBatchNorm``, so one rank alone cannot repeat a call.
    """
    shared = any(map(is_distributed, model.parameters())) or any(
        isinstance(module, nn.SyncBatchNorm) for module in model.modules()
    )
    return None if shared else unwrapped_network(model)


def arguments_of(
    forward: Callable[..., Any], positional: Sequence[Any], keywords: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call, keyed by their names in the signature of `forward`."""
    names = list(inspect.signature(forward).parameters)
    names += [str(number) for number in range(len(names), len(positional))]
    return {**dict(zip(names, positional, strict=False)), **keywords}


def indices_of(inputs: RecordedCall) -> tuple[int, ...]:
    """Return the indices of a call's samples in the data set; empty if the batch has none."""
    for name, tensor in tensors_in(inputs.arguments):
        if name.rpartition(".")[2] in _INDICES and not tensor.is_floating_point():
            return tuple(tensor.reshape(-1).tolist())
    return ()


def tensors_in(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield each tensor in nested sequences and mappings, with its dotted key."""
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}.{key}".lstrip("."))
    elif isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        for number, item in enumerate(value):
            yield from tensors_in(item, f"{name}.{number}".lstrip("."))


def replaced(value: Any, replace: Callable[[Tensor], Tensor]) -> Any:
    """Return a copy of nested containers in which other tensors take the place of the tensors.

    Args:
        value: Tensors in tuples, lists and dictionaries; anything else stays as it is.
        replace: Called once for each tensor, even if the containers hold it several times.
    """
    others: dict[int, Tensor] = {}

    def other(one: Any) -> Any:
        if isinstance(one, Tensor):
            if id(one) not in others:
                others[id(one)] = replace(one)
            return others[id(one)]
        if type(one) in {tuple, list}:
            return type(one)(map(other, one))
        if isinstance(one, tuple) and hasattr(one, "_fields"):
            return type(one)(*map(other, one))
        if not isinstance(one, (dict, UserDict)):
            return one
        # A network may read its batch, and a loop the output, by attribute, so keep the class.
        copied: Any = copy.copy(one)
        for key, item in one.items():
            copied[key] = other(item)
        return copied

    return other(value)


def _cut(tensor: Tensor) -> Tensor:
    return tensor.detach().requires_grad_() if tensor.requires_grad else tensor


def loss_of(output: Any) -> Tensor | None:
    """Return the loss in the output of a network; ``None`` if the output has no loss."""
    if isinstance(output, Mapping):
        output = output.get("loss")
    elif isinstance(output, (tuple, list)) and output:
        output = output[0]
    is_loss = isinstance(output, Tensor) and output.numel() == 1 and output.is_floating_point()
    return output if is_loss else None
