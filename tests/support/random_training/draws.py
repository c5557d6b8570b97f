"""Draw random trainings with hypothesis."""

import math
from typing import Any

from hypothesis import strategies as st

from support.random_training.cases import BLOCKS, FAULTS, OPTIMIZERS, Case, Fault

__all__ = ["cases"]

POWERS = st.integers(0, 16).map(lambda power: 2.0**power)
SCALES = st.one_of(
    st.tuples(st.just("number"), POWERS),
    st.tuples(st.just("fixed"), POWERS),
    st.tuples(
        st.just("dynamic"),
        # From 2.0**70, training begins with overflows, until the scale has fallen to about 2.0**60.
        st.sampled_from([1.0, 2.0**16, 2.0**70]),
        st.sampled_from([2.0, 2.0**5]),
        st.integers(1, 3),
        st.integers(1, 2),
    ),
)
AVERAGES = st.tuples(st.sampled_from([0.0, 0.5, 0.99]), st.booleans(), st.integers(1, 2))


@st.composite
def cases(draw: Any, *, num_ranks: int = 1, per_token: bool = True, max_updates: int = 7) -> Case:
    """Draw a training.

    Args:
        draw: Given by hypothesis.
        num_ranks: Number of ranks.
        per_token: Whether the loss may be normalized per token.
        max_updates: Largest number of updates.
    """
    accumulation, updates = draw(st.integers(1, 3)), draw(st.integers(2, max_updates))
    max_norm = draw(st.sampled_from([None, 0.5, math.inf]))
    blocks = draw(st.lists(st.sampled_from(BLOCKS), max_size=4).map(tuple))
    threshold = None if max_norm is None else draw(st.sampled_from([None, 100.0]))
    # A spike that is neither clipped nor skipped would throw the weights so far that later updates
    # multiply every rounding error.
    is_safe = threshold is not None or max_norm == 0.5
    kinds = [kind for kind in FAULTS if kind != "spike" or is_safe]
    names = [n for n in OPTIMIZERS if not (n.startswith("fused SGD") and "bfloat16" in blocks)]
    fault = st.builds(
        Fault,
        st.integers(0, updates - 1),
        st.integers(0, num_ranks - 1),
        st.integers(0, accumulation - 1),
        st.sampled_from(kinds),
    )
    return Case(
        seed=draw(st.integers(0, 999)),
        blocks=blocks,
        optimizer=draw(st.sampled_from(names)),
        second_rate=draw(st.sampled_from([None, 0.01])),
        max_norm=max_norm,
        threshold=threshold,
        accumulation=accumulation,
        scale=draw(SCALES),
        average=draw(st.none() | AVERAGES),
        per_token=per_token and draw(st.booleans()),
        groups=draw(st.sampled_from([None, "layer"])),
        num_ranks=num_ranks,
        num_updates=updates,
        faults=tuple(draw(st.lists(fault, max_size=3, unique_by=lambda f: f[:3]))),
    )
