"""Draw faults, and the trainings that they are planted into."""

import random
from collections.abc import Callable, Sequence

from support.faults.architecture import (
    BATCH_SIZE,
    NUM_CLASSES,
    VOCABULARY,
    Architecture,
    tokens,
    turns,
)
from support.faults.faults import (
    DATA,
    FLOWING,
    GROUP_SETTINGS,
    LOSSES,
    MOMENTS,
    NETWORK_PARTS,
    NETWORK_SETTINGS,
    OPTIMIZER_STATES,
    Course,
    Fault,
    How,
    Kind,
    Moment,
    What,
    Where,
)
from support.faults.networks import ARCHITECTURES
from support.faults.training import NUM_MICRO_BATCHES, Case

__all__ = ["draw_cases", "networks_of"]

_ALWAYS = 10_000
_LAST_STEP = 60
_LOOPS = ("loop of a cell", "loop of attach", "plain loop")
_OPTIMIZERS = {
    What.FIRST_MOMENT: ("adamw", "sgd", "nadam"),
    What.SECOND_MOMENT: ("adamw", "adagrad", "nadam", "rmsprop"),
    What.STEP_COUNT: ("adamw",),
    What.EPSILON: ("adamw", "adagrad", "rmsprop"),
    What.BETAS: ("adamw", "nadam"),
    What.MOMENTUM: ("sgd",),
    # Adagrad makes its states at the start alone.
    What.OPTIMIZER_STATE: ("adamw", "adamw", "sgd", "nadam", "rmsprop"),
    What.GROUP_WEIGHT_DECAY: ("adamw", "sgd"),
    # Adam divides by the norms of gradients, whatever the clip has made of them.
    What.CLIPPING: ("sgd",),
}
"""Optimizers that have what a fault changes."""

_SIZES = {
    How.RAISED: (5.0, 1e6),
    How.LOWERED: (5.0, 1e6),
    How.NOISE: (1.0, 1e3),
    How.CLAMPED: (3.0, 1e3),
    How.SHIFTED: (0.3, 300.0),
    How.TERM: (1.0, 1e4),
}
"""Least and largest size."""

_OWN_SIZES = {
    (What.EPSILON, How.RAISED): (1e2, 1e8),
    (What.WEIGHT_DECAY, How.RAISED): (100.0, 1e5),
    (What.BETAS, How.LOWERED): (1.1, 10.0),
    (What.BETAS, How.RAISED): (3.0, 1e3),
    (What.MOMENTUM, How.RAISED): (3.0, 1e3),
    (What.LABEL_SMOOTHING, How.RAISED): (0.1, 0.9),
    (What.DROPOUT, How.RAISED): (0.2, 0.95),
    (What.TEMPERATURE, How.RAISED): (2.0, 100.0),
    (What.TEMPERATURE, How.LOWERED): (2.0, 100.0),
    (What.SOFT_CAP, How.RAISED): (3.0, 100.0),
    (What.SOFT_CAP, How.LOWERED): (10.0, 1e3),
    (What.KL_WEIGHT, How.RAISED): (3.0, 1e3),
    (What.GROUP_WEIGHT_DECAY, How.RAISED): (1e3, 1e5),
    (What.CLIPPING, How.LOWERED): (10.0, 1e4),
    (What.INPUTS, How.SHIFTED): (1.0, 30.0),
    (What.POSITIONS, How.RAISED): (2.0, 5.0),
    (What.ATTENTION_SCALE, How.RAISED): (3.0, 100.0),
    (What.NORM_EPSILON, How.RAISED): (1e5, 1e9),
    (What.RESIDUAL, How.RAISED): (2.0, 30.0),
    (What.AUXILIARY_WEIGHT, How.RAISED): (30.0, 1e4),
    (What.EMBEDDING, How.RAISED): (3.0, 100.0),
    (What.ADAPTER_SCALE, How.RAISED): (3.0, 100.0),
    (What.LOGITS, How.LOGARITHMS): (10.0, 300.0),
    (What.ACTIVATION_GRADIENT, How.FLOAT8): (300.0, 3e5),
}
_LASTING_SIZES = {
    (What.INPUTS, How.RAISED): (2.0, 255.0),
    (What.TARGET_VALUES, How.RAISED): (2.0, 1e3),
    (What.UPDATE, How.REPEATED): (3.0, 30.0),
    (What.GRADIENT, How.RAISED): (2.0, 64.0),
    (What.OUTER_LOSS, How.LOWERED): (2.0, 64.0),
}
"""Sizes of faults that no outlier has, but a unit, or a number of calls, ranks or micro-batches."""
_GROWTH = (1.2, 2.0)


_OF_VALUES = {
    How.RAISED,
    How.NAN,
    How.INFINITE,
    How.ZERO,
    How.SHIFTED,
    How.REORDERED,
    How.MIXED,
}
"""What happens to inputs that are not numbers of tokens."""


def networks_of(kind: Kind, *, unseen: bool) -> list[str]:
    """Return the names of the architectures that can have a kind of fault.

    They are the unseen ones or the others; if none of these can have it, all that can.
    """
    names = [name for name, each in ARCHITECTURES.items() if _fits(kind, each)]
    return [name for name in names if ARCHITECTURES[name].is_unseen == unseen] or names


def _fits(kind: Kind, architecture: Architecture) -> bool:
    what, how = kind.what, kind.how
    if what in NETWORK_SETTINGS:
        return NETWORK_SETTINGS[what] in architecture.settings
    if what in NETWORK_PARTS:
        return NETWORK_PARTS[what] in architecture.parts
    if what in _NEEDS:
        return _NEEDS[what](architecture, how)
    if how is How.FLOAT16:
        return "bfloat16" in architecture.dtypes or architecture.is_mixed
    return True


def _has_values(architecture: Architecture) -> bool:
    """Return whether the targets are not numbers of classes."""
    is_without = architecture.num_targets is None and not architecture.ignores
    return is_without and architecture.inputs != "states"


def _has_targets(architecture: Architecture, how: How) -> bool:
    has_classes = architecture.num_targets is not None and architecture.inputs != "states"
    if how is How.MISSING:
        return has_classes and architecture.ignores
    if how is How.SHIFTED:
        return has_classes
    if how is How.TRUNCATED:
        return architecture.num_targets == VOCABULARY and architecture.ignores
    return has_classes or _has_values(architecture)


def _has_inputs(architecture: Architecture, how: How) -> bool:
    if architecture.divider is not None and how in {How.RAISED, How.SHIFTED}:
        # The network takes the mean and the spread out again.
        return False
    return how not in _OF_VALUES or architecture.inputs != "input_ids"


_NEEDS: dict[What, Callable[[Architecture, How], bool]] = {
    What.BUFFER: lambda network, _: network.buffer is not None,
    What.TARGETS: _has_targets,
    What.TARGET_VALUES: lambda network, _: _has_values(network),
    What.INPUTS: _has_inputs,
    What.VOCABULARY: lambda network, _: network.row in {tokens, turns},
    What.SEQUENCE: lambda network, _: network.row in {tokens, turns},
    What.PADDING_MASK: lambda network, _: network.counter is not None,
    What.FROZEN_WEIGHT: lambda network, _: "adapter_scale" in network.parts,
    What.FREQUENCIES: lambda network, _: network.frequencies is not None,
    What.BATCH: lambda network, how: how is not How.SORTED or network.num_targets == NUM_CLASSES,
    What.LOGITS: lambda network, _: network.num_targets is not None and network.head is not None,
}
"""What a network needs for a change of something."""


_EARLY = {
    # What is missing from the updates matters while the network learns.
    (What.UPDATE, How.MISSING): 1.0,
    (What.GROUP_RATE, How.ZERO): 1.0,
    (What.CLIPPING, How.LOWERED): 1.0,
    # These parts matter from the start.
    (What.NORM, How.MISSING): 0.5,
    (What.LAYER, How.REPEATED): 0.5,
    (What.EMBEDDING, How.RAISED): 0.5,
    # What it has learned matters for these, as for the other parts.
    (What.WEIGHT, How.SWAPPED): 0.0,
    (What.WEIGHT, How.ANEW): 0.0,
    (What.WEIGHT, How.TRANSPOSED): 0.0,
    (What.INPUTS, How.REORDERED): 0.0,
    (What.INPUTS, How.TRUNCATED): 0.0,
    (What.TARGETS, How.SHIFTED): 0.0,
    (What.VOCABULARY, How.PERMUTED): 0.0,
    (What.LOGITS, How.PERMUTED): 0.0,
    (What.WEIGHT, How.MIXED): 0.0,
    (What.WEIGHT, How.REPEATED): 0.0,
    (What.SEQUENCE, How.REPEATED): 0.0,
    (What.SEQUENCE, How.TRUNCATED): 0.0,
    (What.TARGETS, How.TRUNCATED): 0.0,
}
"""Share of the faults in the first 20 steps, if it is not a half. Without any, they are later."""


def draw_cases(
    kinds: Sequence[Kind], seed: int, number: int, *, unseen: bool = False, num_ranks: int = 1
) -> list[Case]:
    """Draw cases that have every kind of fault equally often.

    About half of the faults are within the first 20 steps, see `_EARLY`.

    Args:
        kinds: Kinds to draw from.
        seed: Seed of the draw.
        number: Number of cases.
        unseen: Whether to take the unseen architectures.
        num_ranks: Number of ranks that will train them.
    """
    dice = random.Random(seed)  # noqa: S311  (test data, not cryptography)
    order = list(kinds)
    cases = []
    for place in range(number):
        if place % len(order) == 0:
            dice.shuffle(order)
        kind = order[place % len(order)]
        names = networks_of(kind, unseen=unseen)
        if num_ranks > 1 and kind.how is How.TERM:
            # DistributedDataParallel refuses weights that are used outside of a reentrant backward.
            names = [each for each in names if not each.startswith("reentrant")]
        name = dice.choice(names)
        cases.append(_draw_case(dice, kind, name, num_ranks))
    return cases


def _draw_case(dice: random.Random, kind: Kind, name: str, num_ranks: int) -> Case:
    architecture = ARCHITECTURES[name]
    is_half = kind.how is How.FLOAT16
    ways: tuple[str, ...] = ("cell", "attach", "trainer", *_LOOPS)
    if kind.what in {What.OUTER_LOSS, What.CLIPPING}:
        ways = ("attach", "loop of attach", "plain loop")
    if is_half:
        ways = ("cell", "loop of a cell")
    way = dice.choice(ways)
    optimizers = ("adamw",) * 6 + ("sgd", "adagrad", "nadam", "rmsprop")
    if name.startswith("lora"):
        optimizers += ("muon",)
    optimizer = dice.choice(_OPTIMIZERS.get(kind.what, ("adamw",) if is_half else optimizers))
    in_bfloat16 = (
        way in {"cell", "loop of a cell"}
        and not is_half
        and optimizer == "adamw"
        and "bfloat16" in architecture.dtypes
        and dice.random() < 0.3
    )
    fault = _draw_fault(dice, kind, architecture, way, num_ranks)
    return Case(
        architecture=name,
        way=way,
        fault=fault,
        seed=dice.randrange(1000),
        optimizer=optimizer,
        rate=dice.choice(architecture.rates),
        # The first updates of these optimizers are large, so a training without warm-up is not
        # healthy.
        warmup=dice.choice([1, 5, 20] if optimizer in {"adamw", "sgd"} else [5, 20]),
        has_groups=kind.what in GROUP_SETTINGS,
        dtype="bfloat16" if in_bfloat16 else "float32",
    )


def _draw_fault(
    dice: random.Random, kind: Kind, architecture: Architecture, way: str, num_ranks: int
) -> Fault:
    what, course = kind.what, kind.course
    is_brief = course is Course.BRIEF
    repeats = is_brief and what in FLOWING | LOSSES | DATA | {What.RATE, *NETWORK_SETTINGS}
    lengths = [3, 5, 10] if kind.how is How.KEPT else [1, 1, 3, 5]
    where = dice.choice(_wheres(kind))
    is_in_batch = what in FLOWING | LOSSES | DATA
    micro_batch = None
    if is_in_batch and is_brief and kind.how is not How.KEPT and dice.random() < 0.5:
        micro_batch = dice.randrange(NUM_MICRO_BATCHES)
    row = None
    if (
        micro_batch is not None
        and architecture.has_separate_rows
        and what in DATA | {What.ACTIVATION, What.ACTIVATION_GRADIENT, What.LOGITS}
        and kind.how not in {How.PERMUTED, How.MISSING}
        and dice.random() < 0.5
    ):
        row = dice.randrange(BATCH_SIZE)
    layer: int | None = dice.randrange(len(architecture.layers))
    is_in_weight = what in {What.WEIGHT, What.GRADIENT, *MOMENTS} and where is not Where.LAYER
    # Of a network that is loaded, the head is what is new.
    share = 1.0 if kind.how is How.ANEW else 0.25
    if (is_in_weight or what in GROUP_SETTINGS) and dice.random() < share:
        layer = None
    if kind.how is How.FLOAT16:
        where = Where.LAYER if architecture.is_mixed else Where.ALL
        layer = None if where is Where.ALL else 0
    share = _EARLY.get((what, kind.how), 0.0 if what in NETWORK_PARTS else 0.5)
    late = (21, _LAST_STEP) if share else (41, _LAST_STEP + 20)
    step = dice.randint(3, 20) if dice.random() < share else dice.randint(*late)
    return Fault(
        kind=kind,
        step=1 if kind.how is How.FLOAT16 else step,
        num_steps=(dice.choice(lengths) if repeats else 1) if is_brief else _ALWAYS,
        size=_size(dice, kind),
        where=where,
        layer=layer,
        pick=dice.randrange(1000),
        moment=_moment(dice, kind),
        rank=dice.randrange(num_ranks) if _is_of_one_rank(dice, kind, num_ranks) else None,
        micro_batch=micro_batch,
        row=row,
        lag=dice.randint(1, 6),
    )


def _is_of_one_rank(dice: random.Random, kind: Kind, num_ranks: int) -> bool:
    # The ranks have the same types, and DistributedDataParallel sends the buffers of rank 0.
    is_of_all = kind.what in {What.BUFFER, What.FREQUENCIES} or kind.how is How.FLOAT16
    return num_ranks > 1 and not is_of_all and dice.random() < 0.5


def _size(dice: random.Random, kind: Kind) -> float:
    sizes = _OWN_SIZES | (_LASTING_SIZES if kind.course is Course.LASTING else {})
    least, largest = sizes.get((kind.what, kind.how), _SIZES.get(kind.how, (1.0, 1.0)))
    if kind.course is Course.GROWING:
        least, largest = _GROWTH
    return float(least * (largest / least) ** dice.random())


_LAYER_OR_ALL = (Where.LAYER, Where.ALL, Where.ALL)
_OWN_WHERES: dict[tuple[What, How], tuple[Where, ...]] = {
    (What.WEIGHT, How.SWAPPED): (Where.TENSOR, Where.LAYER, Where.LAYER),
    (What.WEIGHT, How.ANEW): (Where.TENSOR, Where.LAYER, Where.LAYER),
    (What.WEIGHT, How.MIXED): _LAYER_OR_ALL,
    (What.GRADIENT, How.SWAPPED): _LAYER_OR_ALL,
    (What.OPTIMIZER_STATE, How.SWAPPED): _LAYER_OR_ALL,
    (What.ACTIVATION, How.TRANSPOSED): _LAYER_OR_ALL,
    (What.ACTIVATION_GRADIENT, How.FLOAT8): _LAYER_OR_ALL,
    (What.WEIGHT, How.REPEATED): (Where.TENSOR, Where.LAYER, Where.ALL),
    (What.WEIGHT, How.TRANSPOSED): (Where.TENSOR, Where.LAYER, Where.ALL),
    (What.GRADIENT, How.KEPT): (Where.ALL,),
    (What.UPDATE, How.MISSING): _LAYER_OR_ALL,
    (What.ATTENTION_SCALE, How.RAISED): _LAYER_OR_ALL,
    (What.NORM_EPSILON, How.RAISED): _LAYER_OR_ALL,
    (What.RESIDUAL, How.RAISED): _LAYER_OR_ALL,
    (What.RESIDUAL, How.MISSING): _LAYER_OR_ALL,
    (What.ROUTING, How.CONSTANT): _LAYER_OR_ALL,
    (What.ROUTING, How.ZERO): _LAYER_OR_ALL,
    (What.NORM, How.MISSING): _LAYER_OR_ALL,
    (What.LAYER, How.REPEATED): _LAYER_OR_ALL,
    (What.ADAPTER_SCALE, How.RAISED): _LAYER_OR_ALL,
    (What.GROUP_RATE, How.RAISED): (Where.LAYER,),
    (What.GROUP_RATE, How.ZERO): (Where.LAYER,),
    (What.GROUP_WEIGHT_DECAY, How.RAISED): (Where.LAYER,),
    (What.LOGITS, How.PERMUTED): (Where.TENSOR,),
    (What.LOGITS, How.PROBABILITIES): (Where.TENSOR,),
    (What.LOGITS, How.LOGARITHMS): (Where.TENSOR,),
    (What.LOGITS, How.INFINITE): (Where.TENSOR, Where.TENSOR, Where.ELEMENT),
}


def _wheres(kind: Kind) -> tuple[Where, ...]:
    """Return the places to draw from; a place that is there twice is drawn more often."""
    what, how, is_brief = kind.what, kind.how, kind.course is Course.BRIEF
    wheres: tuple[Where, ...] = (Where.ALL,)
    if (what, how) in _OWN_WHERES:
        wheres = _OWN_WHERES[what, how]
    elif how is How.BIT:
        wheres = (Where.ELEMENT,)
    elif what in {
        What.WEIGHT,
        What.FROZEN_WEIGHT,
        What.GRADIENT,
        What.FIRST_MOMENT,
        What.SECOND_MOMENT,
    }:
        wheres = (Where.TENSOR, Where.LAYER, Where.ALL)
        if is_brief and how not in {How.PERMUTED, How.STALE}:
            wheres += (*wheres, Where.ELEMENT, Where.ROW)
    elif what in {What.ACTIVATION, What.ACTIVATION_GRADIENT}:
        wheres = (Where.TENSOR, Where.LAYER)
        if is_brief and how in {How.NAN, How.INFINITE, How.RAISED}:
            wheres += (Where.LAYER, Where.ELEMENT)
    elif what in {What.BUFFER, What.FREQUENCIES}:
        wheres = (Where.ELEMENT, Where.TENSOR)
    elif how is How.ROUNDED:
        wheres = (Where.LAYER,)
    return wheres


_IN_MEMORY = OPTIMIZER_STATES | {
    What.WEIGHT,
    What.FROZEN_WEIGHT,
    What.ALL_WEIGHTS,
    What.BUFFER,
    What.FREQUENCIES,
}


def _moment(dice: random.Random, kind: Kind) -> Moment:
    if kind.how is How.ROUNDED:
        return Moment.AFTER
    if kind.what is What.GRADIENT and kind.how is How.SWAPPED:
        return Moment.BETWEEN
    if kind.what in _IN_MEMORY:
        return dice.choice(list(Moment))
    return Moment.BEFORE
