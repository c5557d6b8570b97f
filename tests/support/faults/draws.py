"""Draw faults, and the trainings that they are planted into."""

import random
from collections.abc import Sequence

from support.faults.architecture import BATCH_SIZE, Architecture
from support.faults.faults import (
    DATA,
    FLOWING,
    LOSSES,
    MOMENTS,
    NETWORK_SETTINGS,
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
}
_GROWTH = (1.2, 2.0)


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
    if what is What.BUFFER:
        return architecture.buffer is not None
    if what is What.TARGETS:
        has_targets = architecture.inputs != "states" and (
            architecture.num_targets is not None or not architecture.ignores
        )
        return has_targets and (
            how is not How.MISSING
            or (architecture.num_targets is not None and architecture.ignores)
        )
    if what is What.INPUTS and how in {How.RAISED, How.NAN}:
        return architecture.inputs != "input_ids"
    if how is How.FLOAT16:
        return "bfloat16" in architecture.dtypes or architecture.is_mixed
    return True


def draw_cases(
    kinds: Sequence[Kind], seed: int, number: int, *, unseen: bool = False, num_ranks: int = 1
) -> list[Case]:
    """Draw cases that have every kind of fault equally often.

    Half of the faults are within the first 20 steps.

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
        name = dice.choice(networks_of(kind, unseen=unseen))
        cases.append(_draw_case(dice, kind, name, num_ranks))
    return cases


def _draw_case(dice: random.Random, kind: Kind, name: str, num_ranks: int) -> Case:
    architecture = ARCHITECTURES[name]
    is_half = kind.how is How.FLOAT16
    ways: tuple[str, ...] = ("cell", "attach", "trainer", *_LOOPS)
    if kind.what is What.OUTER_LOSS:
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
        rate=dice.choice([3e-3, 1e-2]),
        # The first updates of these optimizers are large, so a training without warm-up is not
        # healthy.
        warmup=dice.choice([1, 5, 20] if optimizer in {"adamw", "sgd"} else [5, 20]),
        dtype="bfloat16" if in_bfloat16 else "float32",
    )


def _draw_fault(
    dice: random.Random, kind: Kind, architecture: Architecture, way: str, num_ranks: int
) -> Fault:
    what, course = kind.what, kind.course
    is_brief = course is Course.BRIEF
    repeats = is_brief and what in FLOWING | LOSSES | DATA | {What.RATE, *NETWORK_SETTINGS}
    where = dice.choice(_wheres(kind))
    is_in_batch = what in FLOWING | LOSSES | DATA
    micro_batch = None
    if is_in_batch and is_brief and dice.random() < 0.5:
        micro_batch = dice.randrange(NUM_MICRO_BATCHES)
    row = None
    if (
        micro_batch is not None
        and architecture.has_separate_rows
        and what in DATA | {What.ACTIVATION, What.ACTIVATION_GRADIENT}
        and kind.how not in {How.PERMUTED, How.MISSING}
        and dice.random() < 0.5
    ):
        row = dice.randrange(BATCH_SIZE)
    layer: int | None = dice.randrange(len(architecture.layers))
    is_in_weight = what in {What.WEIGHT, What.GRADIENT, *MOMENTS} and where is not Where.LAYER
    if is_in_weight and dice.random() < 0.25:
        layer = None
    if kind.how is How.FLOAT16:
        where = Where.LAYER if architecture.is_mixed else Where.ALL
        layer = None if where is Where.ALL else 0
    step = dice.randint(3, 20) if dice.random() < 0.5 else dice.randint(21, _LAST_STEP)
    return Fault(
        kind=kind,
        step=1 if kind.how is How.FLOAT16 else step,
        num_steps=(dice.choice([1, 1, 3, 5]) if repeats else 1) if is_brief else _ALWAYS,
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
    is_of_all = kind.what is What.BUFFER or kind.how is How.FLOAT16
    return num_ranks > 1 and not is_of_all and dice.random() < 0.5


def _size(dice: random.Random, kind: Kind) -> float:
    least, largest = _OWN_SIZES.get((kind.what, kind.how), _SIZES.get(kind.how, (1.0, 1.0)))
    if kind.course is Course.GROWING:
        least, largest = _GROWTH
    return float(least * (largest / least) ** dice.random())


def _wheres(kind: Kind) -> tuple[Where, ...]:
    """Return the places to draw from; a place that is there twice is drawn more often."""
    what, how, is_brief = kind.what, kind.how, kind.course is Course.BRIEF
    wheres: tuple[Where, ...] = (Where.ALL,)
    if how is How.BIT:
        wheres = (Where.ELEMENT,)
    elif what in {What.WEIGHT, What.GRADIENT, What.FIRST_MOMENT, What.SECOND_MOMENT}:
        wheres = (Where.TENSOR, Where.LAYER, Where.ALL)
        if is_brief and how not in {How.PERMUTED, How.STALE}:
            wheres += (*wheres, Where.ELEMENT, Where.ROW)
    elif what in {What.ACTIVATION, What.ACTIVATION_GRADIENT}:
        wheres = (Where.TENSOR, Where.LAYER)
        if is_brief and how in {How.NAN, How.INFINITE, How.RAISED}:
            wheres += (Where.LAYER, Where.ELEMENT)
    elif what is What.BUFFER:
        wheres = (Where.ELEMENT, Where.TENSOR)
    elif how is How.ROUNDED:
        wheres = (Where.LAYER,)
    return wheres


def _moment(dice: random.Random, kind: Kind) -> Moment:
    if kind.how is How.ROUNDED:
        return Moment.AFTER
    if kind.what in {What.WEIGHT, What.ALL_WEIGHTS, What.BUFFER} | set(MOMENTS):
        return dice.choice(list(Moment))
    return Moment.BEFORE
