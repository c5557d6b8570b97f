"""Train, stop and resume on one number of ranks after another, and compare with one whole run."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from support.ranks.changing import NUM_ROWS, NUM_STEPS
from support.ranks.pool import RankPool

__all__ = ["CHAIN", "assert_a_chain_is_exact"]

CHAIN = ((2, 7), (1, 11), (3, 15), (4, NUM_STEPS))
"""Numbers of ranks, each with the step to stop after. Step 15 is the end of an epoch."""

_STEPS_AN_EPOCH = 5


def assert_a_chain_is_exact(
    pools: Callable[[int], RankPool],
    folder: Path,
    program: Callable[..., dict[str, Any]],
    *arguments: Any,
    chain: Sequence[tuple[int, int]] = CHAIN,
) -> list[dict[str, Any]]:
    """Run a program along a chain of numbers of ranks, and compare it with an uninterrupted run.

    Each update must train on the same rows, each row once per epoch, with losses, rates and final
    weights that agree to 1e-6.

    Args:
        pools: Function that returns the pool of a number of ranks.
        folder: Empty folder.
        program: A program of `support.ranks.changing`.
        arguments: Its arguments after the step to stop after.
        chain: Numbers of ranks, each with the step to stop after.

    Returns:
        The results of the last program on all ranks.
    """
    [(first, _), *_] = chain
    last_step = chain[-1][1]
    whole = pools(first).run(program, str(folder / "whole"), last_step, *arguments)
    expected = _rows(whole)
    rows: dict[int, list[Any]] = {}
    losses: dict[int, float] = {}
    rates: dict[int, float] = {}
    results = []
    for num_ranks, stop in chain:
        results = pools(num_ranks).run(program, str(folder / "run"), stop, *arguments)
        rows |= _rows(results)
        losses |= results[0]["losses"]
        rates |= results[0].get("rates", {})
    assert rows == expected
    assert rates == whole[0].get("rates", {})
    for start in range(0, last_step, _STEPS_AN_EPOCH):
        epoch = [row for step in range(start, start + _STEPS_AN_EPOCH) for row in rows[step + 1]]
        assert len(epoch) == len(set(epoch)) == NUM_ROWS
    assert sorted(losses) == sorted(whole[0]["losses"])
    for step, loss in whole[0]["losses"].items():
        assert abs(losses[step] - loss) < 1e-6 * max(1.0, loss), step
    for result in results:
        for name, weights in whole[0]["weights"].items():
            assert (result["weights"][name] - weights).abs().max() < 1e-6, name
    return results


def _rows(results: Sequence[Mapping[str, Any]]) -> dict[int, list[Any]]:
    """Return the rows of each update on all ranks, in ascending order."""
    steps = results[0]["rows"]
    return {step: sorted(row for each in results for row in each["rows"][step]) for step in steps}
