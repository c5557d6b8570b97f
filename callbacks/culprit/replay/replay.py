"""Record a step and run it again, to find the first module that computes something non-finite."""

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn

from mfwrap.callbacks.culprit.replay.module_calls import ModuleCall, ModuleCalls
from mfwrap.callbacks.culprit.replay.other_models import bad_weight_of_others
from mfwrap.callbacks.culprit.replay.recorder import (
    RandomState,
    RecordedCall,
    StepRecorder,
    indices_of,
    loss_of,
    tensors_in,
)
from mfwrap.callbacks.culprit.replay.targets import IGNORED, is_target
from mfwrap.checkpoints.random_states import HostStates
from mfwrap.compatibility.torch import post_accumulate_hooks
from mfwrap.tensors.norms import norms_of_each
from mfwrap.tensors.shards import local_tensors

_MASK = "attention_mask"
"""Argument of transformers' networks that says which tokens are none."""

_T = TypeVar("_T")
_D = TypeVar("_D")


class Origin(NamedTuple):
    """Where in a step the first non-finite value arises."""

    where: str
    """``"input"``, ``"targets"`` (a micro-batch without targets), ``"mask"`` (one that hides all
    tokens), ``"weight"``, ``"weights"`` (most weights are non-finite), ``"other_weight"`` (one of a
    model beside the network), ``"activation"``, ``"loss"`` or ``"gradient"``."""

    name: str
    """Name of the module, parameter or input; empty for the network itself."""

    micro_batch: int
    rows: tuple[int, ...] = ()
    """Rows of an input that are non-finite."""

    indices: tuple[int, ...] = ()
    """Indices of the micro-batch's samples in the data set, if the batch contains indices."""

    beside: str = ""
    """Module that the forward of the module `name` called next, if the value arises in the code
    between its modules; for a gradient, the module that was called before this code. Empty if the
    module `name` itself is at fault."""

    by_hook: bool = False
    """Whether a hook on the output of the module `name` has changed its gradient."""


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
    ordinary = None
    with undisturbed(recorder):
        for number, inputs in enumerate(recorder.last_step):
            origin = _replay_micro_batch(recorder, inputs, loss_scale, ordinary or ())
            if origin is not None and origin.where == "activation" and ordinary is None:
                ordinary = _ordinarily_bad(recorder)
                if ordinary & {origin.name, origin.beside}:
                    origin = _replay_micro_batch(recorder, inputs, loss_scale, ordinary)
            if origin is not None:
                return origin._replace(micro_batch=number, indices=indices_of(inputs))
    return None


def origins_in_columns(recorder: StepRecorder) -> list[Origin]:
    """Return the non-finite rows of columns of the last step that the network did not get.

    Columns that often have such rows are left out. Synchronizes with the device.

    Args:
        recorder: Recorder to which the micro-batches were given; see `StepRecorder.note_batch`.
    """
    return [
        Origin("input", name, number, rows)
        for number, columns in enumerate(recorder.last_columns)
        for name, are_finite in columns.items()
        if (rows := tuple((~are_finite).nonzero().flatten().tolist()))
        and not recorder.is_often_bad(name)
    ]


def origin_outside(recorder: StepRecorder) -> Origin | None:
    """Return what makes a loss non-finite that is computed outside of the network.

    It is a column of the data that the network did not get, if it has a non-finite row or no
    target, or a weight of another model. Synchronizes with the device.

    Args:
        recorder: Recorder of the network.

    Returns:
        ``None`` if nothing is found.
    """
    origin = next(iter(origins_in_columns(recorder)), None)
    if origin is not None:
        return origin
    for number, columns in enumerate(recorder.last_targets):
        for name, has_any in columns.items():
            if not has_any:
                return Origin("targets", name, number)
    return origin_in_others(recorder)


def origin_in_others(recorder: StepRecorder) -> Origin | None:
    """Return a non-finite weight of another model as the origin; ``None`` without one."""
    weight = bad_weight_of_others(recorder)
    return None if weight is None else Origin("other_weight", weight, 0)


def unscaled_norm(recorder: StepRecorder, loss_scale: float) -> float:
    """Run the last step again without its loss scale, and return a bound of its gradients' norm.

    The bound is the sum of the norms of the micro-batches: NaN or infinite if a gradient is, 0
    without a loss. Otherwise as `replay_step`.

    Args:
        recorder: Recorder that holds the inputs.
        loss_scale: Loss scale of the step.
    """
    total = 0.0
    with undisturbed(recorder):
        for call in recorder.last_step:
            with gradients_aside(recorder.network) as weights, torch.enable_grad():
                loss = loss_of(call.run(recorder))
                if loss is None or not loss.requires_grad:
                    continue
                seed = call.loss_gradient
                seed = torch.ones_like(loss) if seed is None else seed / loss_scale
                backward([loss], [seed], weights.values())
                gradients = [weight.grad for weight in weights.values() if weight.grad is not None]
                total += norms_of_each(local_tensors(gradients), loss.device).norm().item()
    return total


@contextlib.contextmanager
def undisturbed(recorder: StepRecorder) -> Iterator[None]:
    """Call the network within the block; then restore random states and buffers.

    The recorder does not record these calls.
    """
    on_device, on_host = RandomState.now(recorder.device), HostStates.now()
    buffers = Buffers(recorder.network)
    recorder.is_on = False
    try:
        yield
    finally:
        recorder.is_on = True
        on_device.restore(recorder.device)
        on_host.restore()
        buffers.restore()


@final
class Buffers:
    """Copies of all buffers of a network.

    Args:
        network: The network.
    """

    def __init__(self, network: nn.Module) -> None:
        self._kept = [
            (network.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], buffer)
            for name, buffer in network.named_buffers()
        ]
        self._contents = [buffer.detach().clone() for *_, buffer in self._kept]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the same tensors with the same contents back."""
        for (module, name, buffer), content in zip(self._kept, self._contents, strict=True):
            buffer.copy_(content)
            # A forward may put a new tensor into the place of a buffer.
            if getattr(module, name) is not buffer:
                setattr(module, name, buffer)


def attempted(recorder: StepRecorder, act: Callable[[], _T], default: _D) -> _T | _D:
    """Return what a function returns that calls the network, or a default if it raises an error.

    The calls run code of the network and of its hooks, which may raise any error. The error must
    not end the training, nor leave the other ranks in a collective.
    """
    try:
        with undisturbed(recorder):
            return act()
    except Exception:  # noqa: BLE001  (see above)
        return default


def _ordinarily_bad(recorder: StepRecorder) -> frozenset[str]:
    """Return the modules whose output is non-finite in the step before, too, and does no harm.

    Padding or a mask may be NaN on purpose. It is so only if the loss is finite, or all outputs of
    the network are where it returns none.
    """
    for inputs in recorder.earlier_step[:1]:
        with _BadOutputs(recorder.network.named_modules()) as calls, torch.no_grad():
            output = inputs.run(recorder)
        loss = loss_of(output)
        tensors = tensors_in(output if loss is None else loss)
        if all(bool(tensor.isfinite().all()) for _, tensor in tensors):
            return frozenset(calls.names)
    return frozenset()


def _replay_micro_batch(
    recorder: StepRecorder,
    inputs: RecordedCall,
    loss_scale: float,
    ordinary: Collection[str],
) -> Origin | None:
    """Check a micro-batch's inputs, forward and backward; the caller sets ``micro_batch``.

    Args:
        recorder: Recorder that holds the inputs.
        inputs: Call of the micro-batch.
        loss_scale: See `replay_step`.
        ordinary: Modules whose output may be non-finite.
    """
    network = recorder.network
    origin = _bad_input(inputs)
    if origin is not None:
        return origin
    with (
        _Watch(network, ordinary) as watch,
        gradients_aside(network) as weights,
        torch.enable_grad(),
    ):
        loss = loss_of(inputs.run(recorder))
        if watch.origin is not None and watch.origin.where in {"loss", "activation"}:
            found = origin_of_loss(inputs)
            # A part of the network, such as a student, may compute a loss of its own.
            if watch.origin.where == "loss" or found.where == "targets":
                return found
        if watch.origin is None and loss is not None and loss.requires_grad:
            seed = inputs.loss_gradient
            if seed is None:
                backward([(loss.float() * loss_scale).sum()], [None], weights.values())
            elif seed.isfinite().all():
                backward([loss], [seed], weights.values())
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
    with _aside(weights.values()):
        yield weights


@contextlib.contextmanager
def _aside(leaves: Collection[Tensor]) -> Iterator[None]:
    gradients = [leaf.grad for leaf in leaves]
    hooks = [post_accumulate_hooks(leaf) for leaf in leaves]
    lifted = [dict(hook) for hook in hooks]
    for leaf, hook in zip(leaves, hooks, strict=True):
        leaf.grad = None
        hook.clear()
    try:
        yield
    finally:
        for leaf, gradient, hook, content in zip(leaves, gradients, hooks, lifted, strict=True):
            leaf.grad = gradient
            hook.update(content)


def backward(
    ends: Sequence[Tensor], seeds: Sequence[Tensor | None], weights: Iterable[Tensor]
) -> None:
    """Run a backward that changes the gradients of a network's weights, and no others.

    A forward may use a trained tensor that is neither an input nor a parameter of the network, such
    as one that the loop has put into an attribute.

    Args:
        ends: Tensors at which the backward begins.
        seeds: Their gradients.
        weights: Weights of the network.
    """
    own = set(map(id, weights))
    with _aside([leaf for leaf in _leaves(ends) if id(leaf) not in own]):
        torch.autograd.backward(ends, seeds)


def _leaves(ends: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors in which a backward accumulates gradients.

    What only modules with reentrant checkpointing use is not among them.
    """
    nodes: list[Any] = [torch.autograd.graph.get_gradient_edge(end).node for end in ends]
    seen, leaves = set(nodes), []
    while nodes:
        node = nodes.pop()
        if type(node).__name__ == "AccumulateGrad":
            leaves.append(node.variable)
        new = {each for each, _ in node.next_functions if each is not None} - seen
        seen |= new
        nodes += new
    return leaves


class _Running(NamedTuple):
    """A module whose forward runs."""

    name: str
    module: nn.Module
    has_nan: bool
    """Whether its inputs hold NaN or +inf."""

    has_minus_inf: bool

    @property
    def has_finite_inputs(self) -> bool:
        return not (self.has_nan or self.has_minus_inf)


@dataclass(slots=True)
class _Flow:
    """A tensor between modules."""

    returned_by: str | None = None
    """Outermost module that has returned it; ``None`` if none has."""

    caller: str = ""
    """Module whose forward has received it from there."""


@final
class _BadOutputs(ModuleCalls):
    """Note the modules that return NaN or +inf, but for the network itself."""

    def __init__(self, modules: Iterable[tuple[str, nn.Module]]) -> None:
        self.names: set[str] = set()
        super().__init__(modules)

    def returned(self, call: ModuleCall, output: Any) -> None:
        has_nan, _ = _non_finite(output)
        if has_nan and call.name:
            self.names.add(call.name)


@final
class _Watch(ModuleCalls):
    """Find the first module with a non-finite output, or a non-finite gradient of its output.

    A module that receives a non-finite value and returns one is not at fault: the forward that
    called it is, between its modules. So it is with gradients, in the order of the backward.

    NaN and +inf are faults. -inf alone may be a mask, as in attention scores before a softmax. It
    is a fault only if it goes on: a module that receives the -inf, or contains the module at fault,
    returns NaN or +inf, or the loss is -inf.

    Args:
        network: The network.
        ordinary: Modules whose output may be non-finite.
    """

    def __init__(self, network: nn.Module, ordinary: Collection[str]) -> None:
        self.origin: Origin | None = None
        self._network, self._ordinary = network, ordinary
        self._masks: dict[str, nn.Module] = {}
        """Modules whose output holds -inf that has not yet turned out to be a mask."""

        self._running: list[_Running] = []
        """Modules whose forward runs, the innermost last."""

        self._flows: dict[int, tuple[weakref.ref[Tensor], _Flow]] = {}
        """Tensors that modules have received and returned, by identity. They are not kept alive."""
        super().__init__(network.named_modules())

    def received(self, call: ModuleCall, arguments: Any) -> Any:
        # Before the call: an operation in place may overwrite the input with its output.
        self._running.append(_Running(call.name, call.module, *_non_finite(arguments)))
        if not call.name:
            return None
        # The gradient of an alias is what the backward of this module makes. That of the tensor
        # also has the shares of others who use it.
        return with_aliases(arguments, lambda one: self._follow_input(call.name, one))

    def made(self, call: ModuleCall, _: Any, output: Any) -> None:
        for _, tensor in tensors_in(output) if call.name else ():
            if tensor.requires_grad and self._flow_of(tensor).returned_by is None:
                self.follow(tensor, self._notice_between(self._flow_of(tensor), call.name))

    def returned(self, call: ModuleCall, output: Any) -> None:
        by_hook = Origin("gradient", call.name, 0, by_hook=True)
        ended = self._running.pop()
        if self.origin is None and call.name not in self._ordinary:
            self._judge(ended, output)
        for _, tensor in tensors_in(output) if call.name else ():
            if tensor.requires_grad:
                flow = self._flow_of(tensor)
                flow.returned_by = call.name
                flow.caller = self._running[-1].name if self._running else ""
                self.follow(tensor, self._notice(lambda: by_hook))

    def _flow_of(self, tensor: Tensor) -> _Flow:
        reference, flow = self._flows.get(id(tensor), (None, None))
        if reference is None or flow is None or reference() is not tensor:
            flow = _Flow()
            self._flows[id(tensor)] = (weakref.ref(tensor), flow)
        return flow

    def _notice(self, origin: Callable[[], Origin | None]) -> Callable[[Tensor], None]:
        """Return a hook that asks for the origin of the first non-finite gradient."""

        def look(gradient: Tensor) -> None:
            if self.origin is None and not gradient.isfinite().all():
                self.origin = origin()

        return look

    def _follow_input(self, name: str, alias: Tensor) -> None:
        """Blame the module `name` for a non-finite gradient of an alias that it receives."""
        flow = self._flow_of(alias)
        # A module such as an identity may return the alias: then others use it.
        blamed = Origin("gradient", name, 0)
        self.follow(alias, self._notice(lambda: blamed if flow.returned_by is None else None))

    def _notice_between(self, flow: _Flow, maker: str) -> Callable[[Tensor], None]:
        """Return a hook that blames the code behind a module for a non-finite gradient.

        What no module has returned, a hook on the output of the module `maker` has replaced.
        """

        def origin() -> Origin:
            if flow.returned_by is None:
                return Origin("gradient", maker, 0, by_hook=True)
            return Origin("gradient", flow.caller, 0, beside=flow.returned_by)

        return self._notice(origin)

    def _judge(self, ended: _Running, output: Any) -> None:
        name = ended.name
        has_nan, has_minus_inf = _non_finite(output)
        if not name:
            # The loss decides: a network may return logits that are masked with -inf.
            loss = loss_of(output)
            has_nan = has_nan or (loss is not None and not loss.isfinite())
        inside = [mask for mask in self._masks if not name or mask.startswith(f"{name}.")]
        if has_nan:
            if inside or (self._masks and not ended.has_finite_inputs):
                sure = ended.has_minus_inf and not ended.has_nan
                self._blame_mask(name, sure=sure)
            elif ended.has_finite_inputs or not self._running:
                self.origin = _origin_in(self._network, ended.module, name)
            else:
                self._blame_caller(name)
        elif has_minus_inf and name:
            self._masks[name] = ended.module
        elif ended.has_minus_inf:
            self._masks.clear()
        else:
            for mask in inside:
                del self._masks[mask]

    def _blame_caller(self, name: str) -> None:
        """Blame the innermost running module that received finite values itself."""
        finite = [each for each in self._running if each.has_finite_inputs]
        caller = finite[-1] if finite else self._running[0]
        origin = _origin_in(self._network, caller.module, caller.name)
        if origin.where in {"activation", "loss"}:
            origin = Origin("activation", caller.name, 0, beside=name)
        self.origin = origin

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


def with_aliases(value: Any, follow: Callable[[Tensor], None]) -> Any:
    """Return arguments in which an alias takes the place of each tensor that has a gradient.

    Args:
        value: Tensors in tuples, lists and dictionaries; anything else stays as it is.
        follow: Called with each alias.
    """
    aliases: dict[int, Tensor] = {}

    def alias(one: Any) -> Any:
        if isinstance(one, Tensor) and one.requires_grad and one.layout is torch.strided:
            if id(one) not in aliases:
                aliases[id(one)] = one.view_as(one)
                follow(aliases[id(one)])
            return aliases[id(one)]
        if type(one) in {tuple, list}:
            return type(one)(map(alias, one))
        return {key: alias(each) for key, each in one.items()} if type(one) is dict else one

    return alias(value)


def _common_module(first: str, second: str) -> str:
    """Return the name of the innermost module that contains both modules."""
    pairs = zip(first.split("."), second.split("."), strict=False)
    return ".".join(one for one, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def _origin_in(network: nn.Module, module: nn.Module, name: str) -> Origin:
    """Return a non-finite weight of the module as the origin; without one, the module's output."""
    for weight_name, weight in module.named_parameters():
        if not weight.isfinite().all():
            weights = list(network.parameters())
            num_bad = sum(not bool(each.isfinite().all()) for each in weights)
            if num_bad > max(1, len(weights) // 2):
                # An update has ruined most weights. The first of them is not the culprit.
                return Origin("weights", "", 0)
            return Origin("weight", f"{name}.{weight_name}" if name else weight_name, 0)
    return Origin("activation" if name else "loss", name, 0)


def origin_of_loss(inputs: RecordedCall) -> Origin:
    """Return the origin of a non-finite loss of a call with finite outputs of all modules.

    It is a non-finite input, targets that are all ignored, a mask that hides all tokens, or the
    loss. Synchronizes.
    """
    origin = _bad_input(inputs)
    if origin is not None:
        return origin
    for name, tensor in tensors_in(inputs.arguments):
        if is_target(name, tensor) and bool((tensor == IGNORED).all()):
            return Origin("targets", name, 0)
        # A boolean mask may be one of torch, in which a token that is hidden is true.
        is_mask = name.rpartition(".")[2] == _MASK and tensor.dtype in {torch.int32, torch.int64}
        if is_mask and not tensor.any():
            return Origin("mask", name, 0)
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


def _is_additive_mask(name: str, tensor: Tensor) -> bool:
    """Tell whether a tensor is one that is added to scores: of 0 and -inf, or by its name."""
    is_named = any(word in name for word in ("mask", "bias"))
    return is_named or bool(((tensor == 0) | (tensor == -float("inf"))).all())


def _bad_input(inputs: RecordedCall) -> Origin | None:
    for name, tensor in tensors_in(inputs.arguments):
        if not tensor.is_floating_point():
            continue
        found = tensor.detach()
        bad = _nan_or_inf(found) if _is_additive_mask(name, found) else ~found.isfinite()
        if bad.any():
            rows = bad.reshape(len(bad), -1).any(dim=1).tolist() if bad.dim() else []
            numbers = tuple(number for number, is_bad in enumerate(rows) if is_bad)
            return Origin("input", name, 0, rows=numbers)
    return None
