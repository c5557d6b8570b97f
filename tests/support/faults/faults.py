"""Faults as compositions: what is changed, how, by how much, for how long, where and when."""

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

__all__ = [
    "DATA",
    "FLOWING",
    "GROUP_SETTINGS",
    "HYPERPARAMETERS",
    "KINDS",
    "LOSSES",
    "MOMENTS",
    "NETWORK_PARTS",
    "NETWORK_SETTINGS",
    "OPTIMIZER_STATES",
    "Course",
    "Fault",
    "How",
    "Kind",
    "Moment",
    "What",
    "Where",
]


class What(StrEnum):
    """What a fault changes."""

    WEIGHT = "weight"
    GRADIENT = "gradient"
    ACTIVATION = "activation"
    ACTIVATION_GRADIENT = "activation gradient"
    BUFFER = "buffer"
    FIRST_MOMENT = "first moment"
    """Of Adam; the momentum buffer of SGD and Muon."""

    SECOND_MOMENT = "second moment"
    """Of Adam; the sum of squares of Adagrad, or the average of squares of RMSprop."""

    STEP_COUNT = "step count"
    RATE = "rate"
    EPSILON = "epsilon"
    BETAS = "betas"
    WEIGHT_DECAY = "weight decay"
    MOMENTUM = "momentum"
    TEMPERATURE = "temperature"
    LABEL_SMOOTHING = "label smoothing"
    KL_WEIGHT = "kl weight"
    SOFT_CAP = "soft cap"
    DROPOUT = "dropout"
    MODE = "mode"
    LOSS = "loss"
    OUTER_LOSS = "outer loss"
    """The loss, outside of the network."""

    INPUTS = "inputs"
    TARGETS = "targets"
    ALL_WEIGHTS = "all weights"
    DTYPE = "dtype"
    OPTIMIZER_STATE = "optimizer state"
    """All of it."""

    GROUP_RATE = "group rate"
    """Of one of the optimizer's groups, of which each layer has one."""

    GROUP_WEIGHT_DECAY = "group weight decay"
    CLIPPING = "clipping"
    UPDATE = "update"
    TARGET_VALUES = "target values"
    """Targets that are not numbers of classes."""

    BATCH = "batch"
    """Rows, their inputs together with their targets."""

    VOCABULARY = "vocabulary"
    ATTENTION_MASK = "attention mask"
    """The mask that hides later tokens."""

    POSITIONS = "positions"
    ATTENTION_SCALE = "attention scale"
    NORM_EPSILON = "norm epsilon"
    RESIDUAL = "residual connection"
    TIED_WEIGHT = "tied weight"
    ROUTING = "routing"
    AUXILIARY_WEIGHT = "auxiliary weight"
    """Weight of the loss that balances the experts."""

    LOGITS = "logits"
    LOSS_GRADIENT = "loss gradient"
    """Gradient of the loss by the logits, while the loss is right."""

    SEQUENCE = "sequence"
    """Tokens of a row, which are its inputs and its targets."""

    PADDING_MASK = "padding mask"
    """Mask that tells which tokens or points of a row there are."""

    NORM = "norm"
    LAYER = "layer"
    EMBEDDING = "embedding"
    ADAPTER_SCALE = "adapter scale"
    FROZEN_WEIGHT = "frozen weight"
    FREQUENCIES = "rotary frequencies"


class How(StrEnum):
    """How it is changed."""

    RAISED = "raised"
    """Multiplied by the size of the fault."""

    LOWERED = "lowered"
    """Divided by the size of the fault."""

    NOISE = "with noise"
    """Plus noise of the size, relative to the root mean square."""

    ZERO = "zero"
    NEGATED = "negated"
    NAN = "NaN"
    INFINITE = "infinite"
    """Plus or minus infinity."""

    BIT = "with a flipped bit"
    """One bit of the exponent of an element."""

    PERMUTED = "permuted"
    """Rows in another order."""

    CONSTANT = "constant"
    STALE = "stale"
    """The value of a few steps before."""

    CLAMPED = "clamped"
    """To the largest absolute value, divided by the size of the fault."""

    SHIFTED = "shifted"
    """Plus the size of the fault."""

    TERM = "with a term of its own"
    """The loss: plus the mean square of the weights, times the size of the fault."""

    MISSING = "missing"
    """Targets: all are padding. Others: it is left out."""

    EVALUATION = "of evaluation"
    OTHER_RUN = "of another run"
    AVERAGED = "averaged"
    """The average over a few steps."""

    FLOAT16 = "float16"
    ROUNDED = "rounded"
    """To bfloat16 after each update."""

    SWAPPED = "swapped"
    """With what has the same shape."""

    ANEW = "initialized anew"
    TRANSPOSED = "transposed"
    """Read from memory in the other order."""

    KEPT = "kept"
    """From the step before, and added to the new one."""

    REPEATED = "repeated"
    SORTED = "sorted"
    """By classes."""

    REORDERED = "reordered"
    """Features, such as columns or channels, in reverse order."""

    TRUNCATED = "truncated"
    """To the first half; the rest is zero, or padding if only targets are truncated."""

    MIXED = "mixed"
    """The mean with the next row, or with the weights of another run."""

    PROBABILITIES = "as probabilities"
    LOGARITHMS = "as logarithms"
    """Of probabilities in steps of one divided by the size, so that small ones are zero."""

    FLOAT8 = "in float8"
    """Divided by the size before they are rounded, and multiplied by it afterwards."""


class Course(StrEnum):
    """For how long it is changed."""

    BRIEF = "brief"
    """In one step or a few. A weight or a state that was changed once stays so."""

    LASTING = "lasting"
    """From a step on, for good."""

    GROWING = "growing"
    """From a step on, each step more than the one before, by a factor."""


class Where(StrEnum):
    """How much of it is changed."""

    ELEMENT = "element"
    ROW = "row"
    TENSOR = "tensor"
    LAYER = "layer"
    ALL = "all"


class Moment(StrEnum):
    """When in the step it is changed."""

    BEFORE = "before the forward"
    BETWEEN = "between backward and update"
    AFTER = "between update and end of the step"


@dataclass(frozen=True, order=True, slots=True)
class Kind:
    """A kind of fault: what is changed, how, and for how long."""

    what: What
    how: How
    course: Course

    def __str__(self) -> str:
        """Return the name, by which a kind is in the split."""
        ending = "" if self.course is Course.BRIEF else f", {self.course}"
        return f"{self.what} {self.how}{ending}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One planted fault."""

    kind: Kind
    step: int
    """First step of the fault, counted from 1."""

    num_steps: int = 1
    size: float = 10.0
    """Magnitude, see `How`; of a growing fault, the factor from one step to the next."""

    where: Where = Where.TENSOR
    layer: int | None = 0
    """Number of the layer; ``None`` for a tensor outside of all layers."""

    pick: int = 0
    """Picks the tensor, the row of a weight or the bit, modulo their number."""

    moment: Moment = Moment.BEFORE
    rank: int | None = None
    """Rank that has the fault; ``None`` for all."""

    micro_batch: int | None = None
    """Micro-batch of each step that has the fault; ``None`` for all."""

    row: int | None = None
    """Row of these micro-batches that has the fault; ``None`` for all."""

    lag: int = 3
    """Steps that a stale value is old, and over which an average is taken."""

    def is_at(self, step: int) -> bool:
        """Return whether a step is one of the fault."""
        return self.step <= step < self.step + self.num_steps

    def size_at(self, step: int) -> float:
        """Return the size at a step."""
        if self.kind.course is not Course.GROWING:
            return self.size
        return float(min(self.size ** (step - self.step + 1), 1e30))


_STATE = {What.WEIGHT, What.BUFFER, What.FIRST_MOMENT, What.SECOND_MOMENT}
FLOWING = frozenset({What.GRADIENT, What.ACTIVATION, What.ACTIVATION_GRADIENT, What.LOGITS})
"""What each forward and backward pass computes anew."""

MOMENTS = {
    What.FIRST_MOMENT: ("exp_avg", "momentum_buffer"),
    What.SECOND_MOMENT: ("exp_avg_sq", "sum", "square_avg"),
    What.STEP_COUNT: ("step",),
}
"""Names of an optimizer's states."""

HYPERPARAMETERS = {
    What.EPSILON: "eps",
    What.BETAS: "betas",
    What.WEIGHT_DECAY: "weight_decay",
    What.MOMENTUM: "momentum",
}
"""Names in the groups of an optimizer, apart from the rate, which the schedule sets."""

NETWORK_SETTINGS = {
    What.TEMPERATURE: "temperature",
    What.LABEL_SMOOTHING: "label_smoothing",
    What.KL_WEIGHT: "kl_weight",
    What.SOFT_CAP: "soft_cap",
    What.DROPOUT: "dropout",
    What.MODE: "mode",
}
"""Settings of the loss or the network, by the names in `Architecture.settings`."""

NETWORK_PARTS = {
    What.ATTENTION_MASK: "attention_mask",
    What.POSITIONS: "positions",
    What.ATTENTION_SCALE: "attention_scale",
    What.NORM_EPSILON: "norm_epsilon",
    What.RESIDUAL: "residual",
    What.TIED_WEIGHT: "tied_weight",
    What.ROUTING: "routing",
    What.AUXILIARY_WEIGHT: "auxiliary_weight",
    What.NORM: "norm",
    What.LAYER: "layer",
    What.EMBEDDING: "embedding",
    What.ADAPTER_SCALE: "adapter_scale",
}
"""Parts of the network, by the names in `Architecture.parts`."""

LOSSES = frozenset({What.LOSS, What.OUTER_LOSS, What.LOSS_GRADIENT})
DATA = frozenset(
    {
        What.INPUTS,
        What.TARGETS,
        What.TARGET_VALUES,
        What.BATCH,
        What.VOCABULARY,
        What.SEQUENCE,
        What.PADDING_MASK,
    }
)
GROUP_SETTINGS = frozenset({What.GROUP_RATE, What.GROUP_WEIGHT_DECAY})
OPTIMIZER_STATES = frozenset({*MOMENTS, What.OPTIMIZER_STATE})
_NUMBERS = {What.RATE, What.STEP_COUNT, *HYPERPARAMETERS, *NETWORK_SETTINGS} - {What.MODE}
_OF_NUMBERS = {How.RAISED, How.LOWERED, How.ZERO, How.NEGATED}
_NON_FINITE = {How.NAN, How.INFINITE}
_SQUARES = {What.BUFFER, What.SECOND_MOMENT}
_TENSORS = _STATE | FLOWING - {What.LOGITS}
_GROWING = {
    What.WEIGHT,
    What.FROZEN_WEIGHT,
    What.ACTIVATION,
    What.GRADIENT,
    What.RATE,
    What.GROUP_RATE,
    What.LOSS,
}
_CODE = {
    *GROUP_SETTINGS,
    What.CLIPPING,
    What.UPDATE,
    *NETWORK_PARTS,
}
_WRONG_PREPROCESSING = {
    How.SHIFTED,
    How.REORDERED,
    How.REPEATED,
    How.SORTED,
    How.TRUNCATED,
    How.MIXED,
}
_WRONG_CODE = {
    How.ZERO,
    How.CLAMPED,
    How.TERM,
    How.PERMUTED,
    How.SWAPPED,
    How.TRANSPOSED,
    How.PROBABILITIES,
    How.LOGARITHMS,
    How.FLOAT8,
}
_WRONG_FACTORS = {
    (What.LOSS, How.RAISED),
    (What.OUTER_LOSS, How.LOWERED),
    (What.GRADIENT, How.RAISED),
}
_OF_TENSORS = {
    How.RAISED,
    How.LOWERED,
    How.NOISE,
    How.ZERO,
    How.NEGATED,
    How.NAN,
    How.INFINITE,
    How.BIT,
    How.PERMUTED,
    How.CONSTANT,
    How.STALE,
    How.CLAMPED,
}

_HOWS: tuple[tuple[set[What] | frozenset[What], set[How]], ...] = (
    (_TENSORS, _OF_TENSORS),
    (_NUMBERS, _OF_NUMBERS),
    ({What.LOSS, What.OUTER_LOSS}, {*_OF_NUMBERS, *_NON_FINITE, How.SHIFTED, How.TERM}),
    (
        {What.INPUTS, What.TARGETS},
        {How.RAISED, How.NOISE, How.NAN, How.PERMUTED, How.CONSTANT, How.STALE, How.MISSING},
    ),
    ({What.MODE}, {How.EVALUATION}),
    ({What.ALL_WEIGHTS}, {How.OTHER_RUN, How.AVERAGED}),
    ({What.DTYPE}, {How.FLOAT16, How.ROUNDED}),
    ({What.WEIGHT}, {How.SWAPPED, How.ANEW, How.TRANSPOSED}),
    ({What.GRADIENT}, {How.KEPT}),
    ({What.OPTIMIZER_STATE}, {How.MISSING}),
    ({What.GROUP_RATE}, {How.RAISED, How.ZERO}),
    ({What.GROUP_WEIGHT_DECAY}, {How.RAISED}),
    ({What.CLIPPING}, {How.LOWERED}),
    ({What.UPDATE}, {How.MISSING, How.REPEATED}),
    ({What.INPUTS}, {How.ZERO, How.SHIFTED, How.REORDERED, How.TRUNCATED}),
    ({What.TARGETS}, {How.SHIFTED}),
    ({What.TARGET_VALUES}, {How.RAISED, How.NAN}),
    ({What.BATCH}, {How.REPEATED, How.SORTED}),
    ({What.VOCABULARY}, {How.PERMUTED}),
    ({What.ATTENTION_MASK}, {How.MISSING, How.SHIFTED}),
    ({What.POSITIONS}, {How.RAISED, How.CONSTANT}),
    ({What.ATTENTION_SCALE}, {How.RAISED}),
    ({What.NORM_EPSILON}, {How.RAISED}),
    ({What.RESIDUAL}, {How.MISSING, How.RAISED}),
    ({What.TIED_WEIGHT}, {How.STALE}),
    ({What.ROUTING}, {How.CONSTANT}),
    ({What.AUXILIARY_WEIGHT}, {How.RAISED}),
    ({What.LOGITS}, {How.INFINITE, How.PERMUTED}),
    ({What.LOSS_GRADIENT}, {How.NAN}),
    ({What.SEQUENCE}, {How.REPEATED, How.TRUNCATED}),
    ({What.PADDING_MASK}, {How.ZERO}),
    ({What.INPUTS}, {How.INFINITE, How.MIXED}),
    ({What.TARGETS}, {How.TRUNCATED}),
    ({What.LOGITS}, {How.PROBABILITIES, How.LOGARITHMS}),
    ({What.OUTER_LOSS}, {How.KEPT}),
    ({What.BETAS, What.OPTIMIZER_STATE, What.GRADIENT}, {How.SWAPPED}),
    ({What.NORM}, {How.MISSING}),
    ({What.LAYER}, {How.REPEATED}),
    ({What.EMBEDDING, What.ADAPTER_SCALE, What.FROZEN_WEIGHT}, {How.RAISED}),
    ({What.ROUTING}, {How.ZERO}),
    ({What.ACTIVATION}, {How.TRANSPOSED}),
    ({What.ACTIVATION_GRADIENT}, {How.FLOAT8}),
    ({What.WEIGHT}, {How.MIXED, How.REPEATED}),
    ({What.FREQUENCIES}, {How.NAN}),
)
"""What can be changed how, before `_EXCLUDED`."""

_Predicate = Callable[[What, How, Course], bool]

_EXCLUDED: tuple[tuple[str, _Predicate], ...] = (
    # What and how.
    (
        "sums of squares have no sign, and are too smooth for noise",
        lambda what, how, _: what in _SQUARES and how in {How.NEGATED, How.NOISE},
    ),
    (
        "bits flip in memory, where a running mean repairs those of a first moment",
        lambda what, how, _: how is How.BIT and what not in {What.WEIGHT, *_SQUARES},
    ),
    (
        "only a weight has rows that mean something, and values to go back to",
        lambda what, how, _: how in {How.PERMUTED, How.STALE} and what in _TENSORS - {What.WEIGHT},
    ),
    (
        "only a layer's function saturates, or a clip that is left in the code",
        lambda what, how, _: how is How.CLAMPED and what is not What.ACTIVATION,
    ),
    (
        "a tensor that is stuck at a value is zero, up to a shift",
        lambda what, how, _: how is How.CONSTANT and what in _TENSORS,
    ),
    (
        "training forgets these within a few steps",
        lambda what, how, _: (
            (how is How.LOWERED and what in {What.BUFFER, What.FIRST_MOMENT, What.ACTIVATION})
            or (how in {How.NOISE, How.NEGATED} and what is What.FIRST_MOMENT)
            or (how is How.ZERO and what is What.BUFFER)
        ),
    ),
    (
        "NaN shows what infinity would",
        lambda what, how, _: (
            how is How.INFINITE
            and what in {What.GRADIENT, What.ACTIVATION_GRADIENT, What.FIRST_MOMENT, What.BUFFER}
        ),
    ),
    (
        "in the backward of an activation, a factor, a lost value or a type is what goes wrong",
        lambda what, how, _: (
            what is What.ACTIVATION_GRADIENT
            and how not in {How.RAISED, How.ZERO, How.NAN, How.FLOAT8}
        ),
    ),
    (
        "only a wrong sign in the code negates these",
        lambda what, how, course: (
            how is How.NEGATED
            and (
                what is What.ACTIVATION
                or (what in {What.GRADIENT, *LOSSES, *_NUMBERS} and course is not Course.LASTING)
                or what in _NUMBERS - {What.RATE}
            )
        ),
    ),
    (
        "training is healthy with less of these",
        lambda what, how, _: (
            how is How.LOWERED and what in _NUMBERS - {What.BETAS, What.TEMPERATURE, What.SOFT_CAP}
        ),
    ),
    (
        "these numbers are zero in healthy trainings, or cannot be",
        lambda what, how, _: (
            how is How.ZERO
            and what
            in _NUMBERS - {What.STEP_COUNT, What.RATE, What.EPSILON, What.MOMENTUM, What.KL_WEIGHT}
        ),
    ),
    (
        "outside of the network, a loss has a wrong factor, is added up or is lost",
        lambda what, how, _: (
            what is What.OUTER_LOSS
            and how not in {How.RAISED, How.LOWERED, How.NEGATED, How.NAN, How.KEPT}
        ),
    ),
    (
        "a loss of zero is a loss that is lowered",
        lambda what, how, _: what is What.LOSS and how is How.ZERO,
    ),
    (
        "targets are numbers of classes",
        lambda what, how, _: what is What.TARGETS and how in {How.RAISED, How.NAN, How.NOISE},
    ),
    (
        "inputs are there, and it is the targets that do not belong to them",
        lambda what, how, _: what is What.INPUTS and how in {How.STALE, How.MISSING, How.PERMUTED},
    ),
    # For how long.
    (
        "what is kept in memory stays as it was changed, unless it is frozen or begins anew",
        lambda what, how, course: (
            what in {*_STATE, What.STEP_COUNT, What.ALL_WEIGHTS, What.OPTIMIZER_STATE}
            and course is Course.LASTING
            and how is not How.STALE
            and (what, how) != (What.STEP_COUNT, How.ZERO)
        ),
    ),
    (
        "only a size grows, where each step multiplies",
        lambda what, how, course: (
            course is Course.GROWING and not (how is How.RAISED and what in _GROWING)
        ),
    ),
    (
        "a setting is changed for good, unless a schedule sets it or it is left on for a while",
        lambda what, how, course: (
            course is Course.BRIEF
            and what in {What.MODE, *_NUMBERS, *_CODE} - {What.STEP_COUNT}
            and not (
                what in {What.RATE, What.WEIGHT_DECAY, What.DROPOUT, What.LABEL_SMOOTHING}
                and how is How.RAISED
            )
            and what is not What.MODE
        ),
    ),
    (
        "a value that is not finite ends what a lasting fault would show",
        lambda _, how, course: course is Course.LASTING and how in _NON_FINITE,
    ),
    (
        "code is wrong for good, and it has these faults",
        lambda what, how, course: (
            what in FLOWING | LOSSES
            and course is Course.LASTING
            and how not in {How.NEGATED, How.KEPT, *_WRONG_CODE}
            and (what, how) not in _WRONG_FACTORS
        ),
    ),
    (
        "a branch that is cut off, a clip, a term, an order or a type is in the code for good",
        lambda what, how, course: (
            what in FLOWING | LOSSES
            and course is Course.BRIEF
            and (how in _WRONG_CODE or (what is What.OUTER_LOSS and how in {How.LOWERED, How.KEPT}))
        ),
    ),
    (
        "an adapter that is merged into frozen weights is merged again and again",
        lambda what, _, course: what is What.FROZEN_WEIGHT and course is not Course.GROWING,
    ),
    (
        "a loader mixes rows up, and a unit is wrong, for good; a source has bad rows for a while",
        lambda what, how, course: (
            what in DATA
            and course is Course.LASTING
            and how not in {How.PERMUTED, How.STALE, How.RAISED, *_WRONG_PREPROCESSING}
        ),
    ),
    (
        "what prepares the rows is code, which is wrong for good",
        lambda what, how, course: (
            what in DATA and course is Course.BRIEF and how in _WRONG_PREPROCESSING
        ),
    ),
    (
        "a loader lags for good",
        lambda what, how, course: (
            what is What.TARGETS and how is How.STALE and course is Course.BRIEF
        ),
    ),
    (
        "a type is chosen, and stays",
        lambda what, _, course: what is What.DTYPE and course is not Course.LASTING,
    ),
)
"""Combinations that make no sense, each with its reason."""


def _kinds() -> tuple[Kind, ...]:
    return tuple(
        Kind(what, how, course)
        for what in What
        for how in How
        if any(what in whats and how in hows for whats, hows in _HOWS)
        for course in Course
        if not any(predicate(what, how, course) for _, predicate in _EXCLUDED)
    )


KINDS = _kinds()
"""All kinds of faults, in the order of `What`, `How` and `Course`."""
