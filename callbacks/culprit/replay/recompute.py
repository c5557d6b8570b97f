"""Run the micro-batches of a step again from the same state, with fingerprints of their values."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from mfwrap.callbacks.culprit.replay.module_calls import ModuleCall, ModuleCalls, Value
from mfwrap.callbacks.culprit.replay.recorder import StepRecorder, replaced, tensors_in
from mfwrap.callbacks.culprit.replay.replay import (
    Buffers,
    backward,
    gradients_aside,
    undisturbed,
)
from mfwrap.checkpoints.random_states import HostStates
from mfwrap.compatibility.fully_shard import ParameterGroup, groups_of
from mfwrap.compatibility.torch import backward_number, version_of
from mfwrap.tensors.fingerprints import row_hashes
from mfwrap.tensors.shards import is_distributed, local_tensor, meeting_device, on_device
from mfwrap.tensors.training_forwards import replay
from mfwrap.tensors.wrappers import sharded_parts

WEIGHT = "gradient of weight"
"""`Value.what` of the gradient of a weight, which no other value of the step is computed from."""


SHARD = "weight"
"""`Value.what` of this rank's part of a weight before the first call."""

_PLACES = 4096
"""Fingerprints whose memory is allocated at once."""


class StepRuns(NamedTuple):
    """Fingerprints of all runs of a step."""

    values: Sequence[Sequence[Value]]
    """Values of each micro-batch, in the order in which the step has computed them."""

    hashes: Tensor
    """Shape ``(runs, values of all micro-batches)``, int64; the first run is the step itself. 0 for
    a value that a run has not computed."""


class _Call(NamedTuple):
    """State at the begin of a call of the network, and the gradients that its backward began with.

    The recorder keeps the inputs, and the states of torch's generators.
    """

    host: HostStates
    buffers: Buffers
    seeds: dict[int, Tensor]
    """Gradient that each output has received from outside of the network, by its place in `_ends`.
    """

    backwards: set[int]
    """Numbers of the backward passes that these gradients belong to."""


class _Version(NamedTuple):
    """Version of a tensor at the begin of a call."""

    name: str
    tensor: Tensor
    version: int


@final
class StepRepetition(ModuleCalls):
    """Take fingerprints of the values of a step while it runs, and of the same step run again.

    Values are what modules receive and return, the gradients of both, and this rank's own gradient
    of each weight. Create the object before the first forward of the step, on every rank at the
    same step. It does not synchronize with the device.

    Args:
        network: Network without DistributedDataParallel. A backward of its output computes the
            gradients; other ranks take part only in the gathers of ``fully_shard``.
    """

    def __init__(self, network: nn.Module) -> None:
        self._network = network
        self._recorder = StepRecorder(network)
        self._calls: list[_Call] = []
        self._runs: list[list[dict[Value, Tensor]]] = [[]]
        self._values: dict[Value, Tensor] = {}
        """Fingerprints of the last call of the network that belongs to a run."""

        self._places = _Places()

        self._is_on = self._is_inside = False
        """Whether modules belong to a run, and whether the network's own forward runs."""

        self._known: dict[int, tuple[weakref.ref[Tensor], int]] = {}
        """Tensors of this call with a fingerprint, by identity, and their versions."""

        self._weights: dict[int, Tensor] = {}
        """Weights whose gradients are followed. Those that ``fully_shard`` gathers are others than
        the optimizer's, and only modules that run have them."""

        self._held = dict(network.named_parameters())
        """Weights that the optimizer changes. ``fully_shard`` has others in the step."""

        self._shards = {n: local_tensor(p) for n, p in self._held.items() if is_distributed(p)}
        """Those whose versions torch does not count when the optimizer changes them."""

        self._versions: list[_Version] = []
        """Inputs of all calls, and weights, which the loop may change before the repetition."""

        self._overlap = False
        """Whether a call has begun before the backward of the call before it."""

        self.has_begun_late = False
        """Whether the step had begun before, so that a part of it is unknown."""
        super().__init__(network.named_modules())

    def received(self, call: ModuleCall, arguments: Any) -> None:
        """Begin a call of the network, or take fingerprints of what a module receives."""
        if not call.name:
            self._begin_call(*arguments)
        if self._is_on:
            self._follow_weights(call)
            self._take("input", call.name, arguments)

    def returned(self, call: ModuleCall, output: Any) -> Any:
        """Take fingerprints of what a module returns.

        Returns:
            In the step itself, the network's output with an alias of each tensor. The gradient of
            the alias is what comes from outside of the network; that of the tensor may also have a
            share from another output, as that of logits has one from a loss.
        """
        if self._is_on:
            self._take("output", call.name, output)
        if call.name:
            return None
        self.has_begun_late |= not self._is_inside
        if self._is_on and len(self._runs) == 1:
            aliases = {
                id(end): _Alias.apply(end, partial(_keep, self._calls[-1], place))  # type: ignore[no-untyped-call]  # (torch)
                for place, end in enumerate(_ends(output))
            }
            output = replaced(output, lambda tensor: aliases.get(id(tensor), tensor))
        # The forward of checkpointed modules runs again in the backward.
        self._is_on, self._is_inside = bool(self._runs[-1]), False
        return output

    def _begin_call(self, positional: Sequence[Any], keywords: Mapping[str, Any]) -> None:
        self._is_inside = True
        repeats = len(self._runs) > 1
        self._is_on = repeats or self._recorder.records(self._network)
        if self._is_on:
            self._values, self._known = {}, {}
            self._runs[-1].append(self._values)
            if not repeats:
                self._overlap |= bool(self._calls) and not self._calls[-1].seeds
                weights = {} if self._calls else self._held
                self._calls.append(_Call(HostStates.now(), Buffers(self._network), {}, set()))
                given = dict([*enumerate(positional), *keywords.items()])
                named = [(f"input {name}", each) for name, each in tensors_in(given)]
                named += weights.items()
                self._versions += [_Version(name, each, version_of(each)) for name, each in named]
            if len(self._runs[-1]) == 1:
                for name, shard in self._shards.items():
                    self._add(self._values, SHARD, name, shard)

    def _follow_weights(self, call: ModuleCall) -> None:
        # A module may use the weights of one that it does not call, as nn.MultiheadAttention does.
        named = call.module.named_parameters(call.name, recurse=not call.name)
        for name, weight in named:
            if weight.requires_grad and id(weight) not in self._weights:
                self._weights[id(weight)] = weight
                self.follow(weight, partial(self._add_weight, name))

    def _add_weight(self, name: str, gradient: Tensor) -> None:
        self._add(self._values, WEIGHT, name, gradient)

    @torch.no_grad()
    def _add(self, values: dict[Value, Tensor], what: str, name: str, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:
            return  # such as the sparse gradient of an embedding
        key = Value(what, name)
        while key in values:
            key = key._replace(number=key.number + 1)
        local = local_tensor(tensor.detach()).reshape(1, -1)
        values[key] = self._places.take(local.device).copy_(row_hashes(local))

    def _take(self, what: str, name: str, value: Any) -> None:
        for _, tensor in tensors_in(value):
            reference, version = self._known.get(id(tensor), (None, None))
            is_known = reference is not None and reference() is tensor
            if is_known and version == version_of(tensor):
                continue
            self._known[id(tensor)] = weakref.ref(tensor), version_of(tensor)
            self._add(self._values, what, name, tensor)
            # The network's own inputs have no graph behind them in the repetition.
            if tensor.grad_fn is not None and (name or what == "output"):
                tensor.register_hook(partial(self._add, self._values, f"gradient of {what}", name))

    def why_impossible(self) -> str:
        """Return why the step cannot be run again, as a clause; empty if it can be."""
        if not self._calls:
            return (
                "no forward pass was seen between `on_step_begin` and `on_pre_optimizer_step`: the "
                "step is captured as a graph, or its loop does not send these events around it"
            )
        if all(len(call.backwards) == 1 for call in self._calls) and not self._overlap:
            return ""
        return (
            "each call of the network must have a backward of its own, only one, which begins with "
            "tensors that the network returns, alone or in tuples, lists and dictionaries"
        )

    def changed(self) -> str:
        """Return the name of an input or weight that was changed in place since its call.

        Returns:
            Empty if there is none. A change through ``Tensor.data`` is not seen.
        """
        changed = (each for each in self._versions if version_of(each.tensor) != each.version)
        return next((each.name for each in changed), "")

    def repeat(self, times: int) -> StepRuns:
        """Run the micro-batches of the step again, and stop following the network.

        Call it before the weights are changed. Gradients, buffers and the states of Python's,
        NumPy's and torch's generators are then as before.

        Args:
            times: Number of repetitions, >= 1.
        """
        self._recorder.end_step()
        try:
            with (
                undisturbed(self._recorder),
                gradients_aside(self._network) as weights,
                _unreduced(self._network) as groups,
                torch.enable_grad(),
                replay(),
            ):
                for _ in range(times):
                    self._runs.append([])
                    for recorded, call in zip(self._recorder.last_step, self._calls, strict=True):
                        call.host.restore()
                        call.buffers.restore()
                        ends = _ends(recorded.run(self._recorder))
                        reached = [ends[place] for place in call.seeds]
                        backward(reached, list(call.seeds.values()), weights.values())
                        for weight in weights.values():
                            weight.grad = None
                        for group in groups:
                            group.discard_gradients()
        finally:
            self.close()
        return self._all_runs()

    def close(self) -> None:
        """Remove all hooks, and release the inputs."""
        super().close()
        self._recorder.close()

    def _all_runs(self) -> StepRuns:
        first = self._runs[0]
        device = meeting_device(each for values in first for each in values.values())
        none = torch.zeros(1, dtype=torch.int64, device=device)
        rows = [
            torch.cat(
                [
                    on_device(again.get(key, none), device)
                    for values, again in zip(first, run, strict=True)
                    for key in values
                ]
            )
            for run in self._runs
        ]
        return StepRuns([list(values) for values in first], torch.stack(rows))


def _ends(output: Any) -> list[Tensor]:
    """Return the tensors in an output at which a backward may begin, each once."""
    ends = {id(each): each for _, each in tensors_in(output) if each.requires_grad}
    return list(ends.values())


def _keep(call: _Call, place: int, gradient: Tensor) -> None:
    call.seeds[place] = gradient.detach()
    call.backwards.add(backward_number())


@final
class _Alias(torch.autograd.Function):
    """Return a tensor of the same memory, and call a function with its gradient.

    The tensor is no view: the loop may change a loss in place, and torch gives a view that is
    changed in place another place in the graph.
    """

    @staticmethod
    def forward(tensor: Tensor, look: Callable[[Tensor], None]) -> Tensor:
        del look
        return tensor.detach()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        del output
        _, ctx.look = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.look(gradient)
        return gradient, None


@final
class _Places:
    """Memory for fingerprints.

    A tensor for each of them would lie in memory that a gradient has just left, and keep the next
    gradient out. The process would then grow by many times the gradients.
    """

    def __init__(self) -> None:
        self._free: dict[torch.device, list[Tensor]] = {}

    def take(self, device: torch.device) -> Tensor:
        """Return one that is free, shape ``(1,)``, int64, without a value."""
        free = self._free.setdefault(device, [])
        if not free:
            free.extend(torch.empty(_PLACES, dtype=torch.int64, device=device).split(1))
        return free.pop()


@contextlib.contextmanager
def _unreduced(network: nn.Module) -> Iterator[list[ParameterGroup]]:
    """Let backward passes leave out the reductions of ``fully_shard``; yield its groups."""
    groups = {part: groups_of(part) for part in sharded_parts(network)}
    reducing = [part for part, of_part in groups.items() if any(g.is_reducing for g in of_part)]
    for part in reducing:
        part.set_requires_gradient_sync(requires_gradient_sync=False, recurse=False)
    try:
        yield [group for of_part in groups.values() for group in of_part]
    finally:
        for part in reducing:
            part.set_requires_gradient_sync(requires_gradient_sync=True, recurse=False)
