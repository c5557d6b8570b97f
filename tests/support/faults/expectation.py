"""What a record must say about a fault, computed from the fault's fields."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import nn

from support.faults.architecture import Architecture
from support.faults.faults import (
    DATA,
    FLOWING,
    GROUP_SETTINGS,
    HYPERPARAMETERS,
    LOSSES,
    NETWORK_PARTS,
    NETWORK_SETTINGS,
    OPTIMIZER_STATES,
    Course,
    Fault,
    How,
    Moment,
    What,
    Where,
)
from support.faults.networks import parameter_names, target_modules, target_weights
from support.faults.parts import embedding_name, planted_layers
from support.faults.series import SAMPLE_INTERVAL

__all__ = ["CAUSES", "WINDOW", "Cause", "Expectation", "expectation_of"]

_POSITIONS = re.compile("position|places|rotary")
"""Matches names of modules that turn positions into vectors."""

WINDOW = 20
"""Steps in which a record of a fault that lasts or grows is in time, up to the next sample."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What is true about a fault. ``None`` means that there is no such place."""

    step: int
    last_step: int
    """Last step at which a record is in time."""

    causes: frozenset[str]
    """Causes that lead a reader to the true place."""

    may_diverge: bool
    """Whether `diverged` is right, too, if the loss has left its course for good."""

    places: tuple[str, ...]
    """Names of the modules and weights that the fault is in; none if it is in no layer."""

    rank: int | None
    micro_batch: int | None
    rows: tuple[int, ...] | None
    has_any_row: bool
    """Whether all rows of the micro-batch have the fault, so that no row is wrong."""


@dataclass(frozen=True, slots=True)
class _Situation:
    fault: Fault
    architecture: Architecture
    places: Sequence[str]

    def is_in(self, part: str | None) -> bool:
        """Return whether the fault is in a part of a layer."""
        return part is not None and any(part in f"{place}." for place in self.places)


@dataclass(frozen=True, slots=True)
class Cause:
    """A cause that is right for some faults."""

    name: str
    is_right: Callable[[_Situation], bool]
    reason: str


def _what(*whats: What) -> Callable[[_Situation], bool]:
    return lambda of: of.fault.kind.what in whats


CAUSES = (
    Cause("learning_rate", _what(What.RATE, What.GROUP_RATE), "the rate is another one"),
    Cause(
        "weight_decay",
        _what(What.WEIGHT_DECAY, What.GROUP_WEIGHT_DECAY),
        "the weight decay is another one",
    ),
    Cause(
        "setting",
        _what(
            What.RATE,
            *GROUP_SETTINGS,
            What.CLIPPING,
            *HYPERPARAMETERS,
            *NETWORK_SETTINGS,
            What.ATTENTION_MASK,
            What.POSITIONS,
            What.ATTENTION_SCALE,
            What.NORM_EPSILON,
            What.AUXILIARY_WEIGHT,
            What.EMBEDDING,
            What.ADAPTER_SCALE,
            What.DTYPE,
        ),
        "a number, a mode or a type that the program has set is another one",
    ),
    *(
        Cause(name, _what(What.UPDATE), "the optimizer's step leaves other weights, states or both")
        for name in (
            "learning_rate",
            "setting",
            "weight_changed",
            "optimizer_state",
            "no_update",
            "no_gradient",
        )
    ),
    Cause(
        "loss",
        _what(
            *LOSSES,
            What.TEMPERATURE,
            What.LABEL_SMOOTHING,
            What.KL_WEIGHT,
            What.SOFT_CAP,
            What.LOGITS,
            What.AUXILIARY_WEIGHT,
        ),
        "the function from the network's logits or parts to its loss is another one",
    ),
    Cause(
        "loss",
        lambda of: (
            of.fault.kind.what is What.GRADIENT
            and of.fault.where is Where.ALL
            and of.fault.kind.how in {How.RAISED, How.LOWERED, How.ZERO, How.NEGATED}
        ),
        "a factor of all gradients is a factor of the gradient of the loss",
    ),
    Cause(
        "optimizer_epsilon",
        lambda of: (
            of.fault.kind.what is What.EPSILON
            or of.fault.kind.how is How.FLOAT16
            or (
                of.fault.kind.what is What.SECOND_MOMENT
                and of.fault.kind.how in {How.ZERO, How.LOWERED}
            )
        ),
        "an update is divided by the epsilon, or by zero, where second moments are that small",
    ),
    Cause(
        "weight_changed",
        _what(What.WEIGHT, What.FROZEN_WEIGHT, What.ALL_WEIGHTS, What.TIED_WEIGHT),
        "weights are others than those that the update has left",
    ),
    Cause(
        "weight_changed",
        lambda of: of.fault.kind.how is How.ROUNDED,
        "rounding changes weights after their update",
    ),
    Cause(
        "optimizer_state",
        _what(*OPTIMIZER_STATES),
        "moments or counts are others than the update has left",
    ),
    Cause("batch_norm", _what(What.BUFFER), "the buffer is a running variance of a BatchNorm"),
    Cause("buffer_changed", _what(What.BUFFER, What.FREQUENCIES), "the buffer is another one"),
    Cause(
        "batch_norm",
        lambda of: (
            of.fault.kind.what is What.INPUTS
            and of.fault.kind.how in {How.NAN, How.INFINITE, How.RAISED, How.SHIFTED}
            and of.architecture.buffer is not None
        ),
        "an input that a BatchNorm averages is in its running statistics from then on",
    ),
    Cause("data", _what(*DATA), "a micro-batch holds others than its inputs or targets"),
    Cause(
        "rank_data",
        lambda of: of.fault.kind.what in DATA and of.fault.rank is not None,
        "the same, on one rank alone",
    ),
    Cause(
        "rank_differs",
        lambda of: (
            of.fault.rank is not None
            and of.fault.kind.what
            in {What.WEIGHT, What.FROZEN_WEIGHT, What.ALL_WEIGHTS, What.GRADIENT}
        ),
        "what the ranks have in common differs on one of them",
    ),
    Cause(
        "activation",
        _what(
            What.ACTIVATION,
            What.LOGITS,
            What.FREQUENCIES,
            *set(NETWORK_PARTS) - {What.AUXILIARY_WEIGHT},
        ),
        "a module's output is not what its inputs make it",
    ),
    Cause(
        "activation",
        lambda of: _zero_divider(of.fault, of.architecture) is not None,
        "a module divides by zero",
    ),
    Cause(
        "gradient",
        _what(
            What.GRADIENT,
            What.ACTIVATION_GRADIENT,
            What.LOSS_GRADIENT,
            What.CLIPPING,
            What.TIED_WEIGHT,
        ),
        "a gradient is not what the backward makes it",
    ),
    Cause(
        "dead_layer",
        lambda of: of.fault.kind.what in FLOWING and of.fault.kind.how in {How.ZERO, How.FLOAT8},
        "weights behind a zero have no gradient, and small numbers are zero in float8",
    ),
    Cause(
        "dead_layer",
        lambda of: of.fault.kind.what is What.NORM and of.fault.kind.how is How.MISSING,
        "the weights of what is left out have no gradient",
    ),
    Cause(
        "gradient",
        lambda of: of.fault.kind.how is How.LOGARITHMS,
        "a logarithm has no finite gradient at zero",
    ),
    Cause(
        "attention_logits",
        lambda of: (
            of.is_in(of.architecture.query)
            and of.fault.kind.what in {What.WEIGHT, What.FROZEN_WEIGHT, What.ACTIVATION}
            and of.fault.kind.how is How.RAISED
        ),
        "the logits grow with the projection that the fault is in",
    ),
    Cause(
        "attention_logits",
        _what(What.ATTENTION_MASK, What.ATTENTION_SCALE),
        "the logits are multiplied by the scale, and the mask is added to them",
    ),
    Cause(
        "router",
        _what(What.ROUTING, What.AUXILIARY_WEIGHT),
        "the routing is another one, or the loss of the routing has another weight",
    ),
    Cause(
        "router",
        lambda of: (
            of.is_in(of.architecture.router)
            and of.fault.kind.what in {What.WEIGHT, What.ACTIVATION}
        ),
        "the router's weights or outputs decide which expert a token goes to",
    ),
)
"""Which causes are right for which faults. A cause is right if the reader is led to the true place,
which is not always what a judge could know."""


def expectation_of(fault: Fault, architecture: Architecture, network: nn.Module) -> Expectation:
    """Return what a record must say about a fault in a network of this architecture."""
    places = _places(fault, architecture, network)
    situation = _Situation(fault, architecture, places)
    kind = fault.kind
    patience = fault.num_steps if kind.course is Course.BRIEF else WINDOW
    if fault.moment is not Moment.BEFORE:
        patience += 1
    last_step = fault.step + patience
    if kind.course is not Course.BRIEF or kind.what in _SAMPLED:
        last_step = -(-last_step // SAMPLE_INTERVAL) * SAMPLE_INTERVAL
    is_all_rows = fault.row is None and kind.what in DATA
    return Expectation(
        step=fault.step,
        last_step=last_step,
        causes=frozenset(cause.name for cause in CAUSES if cause.is_right(situation)),
        may_diverge=kind.course is not Course.BRIEF,
        places=places,
        rank=fault.rank,
        micro_batch=fault.micro_batch,
        rows=None if fault.row is None else (fault.row,),
        has_any_row=is_all_rows,
    )


_SAMPLED = {What.WEIGHT, What.ALL_WEIGHTS, What.BUFFER, What.FREQUENCIES, *OPTIMIZER_STATES}
"""What the monitor reads every ten steps, so that a record is in time up to the next sample."""


_OF_WEIGHTS = {
    What.WEIGHT,
    What.FROZEN_WEIGHT,
    What.GRADIENT,
    What.UPDATE,
    *GROUP_SETTINGS,
    *OPTIMIZER_STATES,
}


def _places(fault: Fault, architecture: Architecture, network: nn.Module) -> tuple[str, ...]:
    """Return the names of what a fault is in; none if it is in the whole network or none of it."""
    what = fault.kind.what
    own = _own_place(fault, architecture, network)
    if own or fault.where is Where.ALL:
        return own
    if what is What.BUFFER:
        layer = architecture.layers[(fault.layer or 0) % len(architecture.layers)]
        return (f"{layer}.{architecture.buffer}",)
    if what in {What.ACTIVATION, What.ACTIVATION_GRADIENT, What.LOGITS}:
        return tuple(target_modules(network, architecture, fault))
    if what in _OF_WEIGHTS or fault.kind.how is How.ROUNDED:
        weights = target_weights(network, architecture, fault)
        return tuple(
            name for weight in weights.values() for name in parameter_names(network, weight)
        )
    if fault.kind.how is How.FLOAT16 and fault.layer is not None:
        return (architecture.layers[fault.layer],)
    return ()


def _own_place(fault: Fault, architecture: Architecture, network: nn.Module) -> tuple[str, ...]:
    """Return the place that a fault has, whatever layer it was drawn for; none without one."""
    what, head = fault.kind.what, architecture.head
    if what in {What.AUXILIARY_WEIGHT, What.ROUTING}:
        layers = planted_layers(architecture, fault)
        return tuple(f"{layer}.{architecture.router}" for layer in layers)
    if what is What.LOSS_GRADIENT:
        # The network's own forward, which computes the loss from what its head returns.
        return ("", *([] if head is None else [head]))
    if head is not None and what is What.TIED_WEIGHT:
        weight = network.get_parameter(f"{head}.weight")
        return (head, *parameter_names(network, weight))
    if what is What.POSITIONS and fault.where is Where.ALL:
        # What turns positions into vectors is where other ones begin.
        names = (name for name, _ in network.named_modules())
        return tuple(name for name in names if _POSITIONS.search(name))
    if what in NETWORK_PARTS and fault.where is not Where.ALL:
        return planted_layers(architecture, fault)
    place = _zero_divider(fault, architecture)
    if what is What.EMBEDDING:
        place = embedding_name(network)
    elif what is What.FREQUENCIES:
        place = architecture.frequencies
    return () if place is None else (place,)


def _zero_divider(fault: Fault, architecture: Architecture) -> str | None:
    """Return the name of the module that divides by zero; ``None`` for none."""
    dividers = {What.INPUTS: architecture.divider, What.PADDING_MASK: architecture.counter}
    return dividers.get(fault.kind.what) if fault.kind.how is How.ZERO else None
