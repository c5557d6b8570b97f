"""Gradients that are reduced after each micro-batch: their memory, messages and decisions."""

import re

import pytest

from support.fsdp.accumulation import (
    NUM_LAYERS,
    NUM_MICRO_BATCHES,
    NUM_PARAMETERS,
    count_accumulation,
    meet_an_early_nan,
)
from support.fsdp.ranks import ranks
from support.paths import ROOT

__all__ = ["ranks"]

SCALARS = 64
"""Bytes of the scalars of a step, which the formulas leave out."""


def documented(label: str, column: int, **symbols: int) -> float:
    """Return the value of the formula in a row of a table of docs/scaling.md.

    Args:
        label: First cell of the row.
        column: Column after the first cell, from 0.
        symbols: Value of each symbol.
    """
    page = (ROOT / "docs" / "scaling.md").read_text(encoding="utf-8")
    [row] = [line for line in page.splitlines() if line.startswith(f"| {label} |")]
    formula = re.findall("`([^`]+)`", row.split(" | ")[column + 1])[0]
    # "4 (T + G)" and "2 k b P / S" leave out the signs of multiplication.
    numerator, _, denominator = formula.partition(" / ")
    value = 1.0
    for factor in re.findall(r"\([^)]+\)|\w+", numerator):
        terms = factor.strip("()").split(" + ")
        value *= sum(symbols[term] if term in symbols else int(term) for term in terms)
    return value / symbols[denominator] if denominator else value


def symbols_of(shard_size: int, dtype: str) -> dict[str, int]:
    """Return the values of the symbols for the network that is counted."""
    reduced = {"float32": 4, "bfloat16": 2}[dtype]
    num_tensors = 2 * NUM_LAYERS
    sizes = {"P": NUM_PARAMETERS, "S": shard_size, "U": NUM_LAYERS, "k": NUM_MICRO_BATCHES}
    return {"b": 4, "r": reduced, "T": num_tensors, "G": num_tensors, **sizes}


@pytest.mark.parametrize("sync_each_batch", [False, True], ids=["once", "each"])
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("layout", ["shards", pytest.param("replicas", marks=pytest.mark.slow)])
def test_shards_take_the_documented_memory_and_messages(ranks, layout, dtype, sync_each_batch):
    """Counted bytes of gradients and messages are those of the formulas."""
    if ranks.number == 1 or (layout == "replicas" and ranks.number == 2):
        pytest.skip("torch sends no messages within one rank")
    symbols = symbols_of(ranks.number // (2 if layout == "replicas" else 1), dtype)

    def expected(label):
        return documented(f"FSDP2{label}", int(sync_each_batch), **symbols)

    for counted in ranks.run(
        count_accumulation, layout, dtype, {"sync_each_batch": sync_each_batch}
    ):
        *between, at_step = counted["added"]
        sent = counted["messages"]
        held = expected(": gradients between two micro-batches, bytes")
        assert between == pytest.approx([held] * (NUM_MICRO_BATCHES - 1), abs=SCALARS)
        held = expected(": gradients at the optimizer's step, bytes")
        assert at_step == pytest.approx(held, abs=SCALARS)
        assert sent["number of _reduce_scatter_base_"] == expected(": reduce-scatters")
        reduced = expected(": inputs of reduce-scatters, bytes")
        assert sent["_reduce_scatter_base_"] == reduced
        gathered = expected(": inputs of gathers of weights, bytes")
        assert sent["_allgather_base_"] == gathered
        norms = 8 * (symbols["T"] + 1)
        replicas = expected(" with replicas: inputs of all-reduces, bytes")
        assert sent["allreduce_"] == norms + (replicas if layout == "replicas" else 0)


@pytest.mark.fast_sample(1)
@pytest.mark.parametrize("sync_each_batch", [False, True], ids=["once", "each"])
def test_replicas_take_the_documented_memory_and_messages(two_ranks, sync_each_batch):
    """Counted bytes under DistributedDataParallel are those of the formulas."""
    kind, column, symbols = (
        "DistributedDataParallel",
        int(sync_each_batch),
        symbols_of(1, "float32"),
    )
    settings = {"sync_each_batch": sync_each_batch}
    for counted in two_ranks.run(count_accumulation, "DDP", "float32", settings):
        held = documented(f"{kind}: gradients, bytes", column, **symbols)
        assert counted["added"] == pytest.approx([held] * NUM_MICRO_BATCHES, abs=SCALARS)
        reduced = documented(f"{kind}: inputs of all-reduces, bytes", column, **symbols)
        assert counted["messages"]["allreduce_"] == reduced


@pytest.mark.slow
def test_averages_and_local_norms_take_the_documented_memory(two_ranks):
    """An average takes the bytes of the formula, and so do the local norms."""
    symbols = symbols_of(2, "float32")
    plain, average, norms = (
        two_ranks.run(count_accumulation, "shards", "float32", settings)[0]
        for settings in ({}, {"ema": True}, {"local_norm": True})
    )

    expected = documented("memory for the average, float32", 1, **symbols)
    more = average["between updates"] - plain["between updates"]
    assert more == pytest.approx(expected, abs=SCALARS)
    assert norms["added"][-1] - plain["added"][-1] == documented(
        "memory for local norms", 1, **symbols
    )


@pytest.mark.fast_sample(2)
@pytest.mark.parametrize("layout", ["layers", "replicas", "partly replicated"])
def test_a_nan_in_the_first_micro_batch_of_one_rank_skips_on_all(ranks, layout):
    """The NaN stays in the sum of the reduced gradients, and skips the update on every rank."""
    if layout == "partly replicated" and ranks.number == 1:
        pytest.skip("needs several ranks")
    for met in ranks.run(meet_an_early_nan, layout, {"sync_each_batch": True}):
        assert met == {"skipped": [True, False], "kept": True, "then": True}
