"""Measure the cells of each layout, and write the table into docs/ranks.md."""

import contextlib
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from support.layouts import training
from support.layouts.layouts import Layout
from support.layouts.unable import Unable
from support.paths import ROOT
from support.ranks.pool import RankPool

__all__ = ["PAGE", "Pools", "cells_of", "read_cells", "with_table"]

PAGE = ROOT / "docs" / "ranks.md"
COLUMNS = (
    "layout",
    "ranks",
    "norm and weights",
    "local norms",
    "NaN on one rank",
    "average",
    "checkpoint",
)
_BEGIN = "<!-- layouts: `make layouts` writes this table -->\n"
_END = "<!-- end of layouts -->\n"
_TOLERANCE = 1e-6
"""Largest difference that counts as equal, relative to the largest magnitude."""


class Pools:
    """Pools of ranks of several sizes, each started when it is first needed."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._pools: dict[int, RankPool] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def run(self, ranks: int, program: Any, *arguments: Any) -> list[Any]:
        """Call ``program(rank, *arguments)`` on a number of ranks; return each rank's result."""
        if ranks not in self._pools:
            folder = self._stack.enter_context(tempfile.TemporaryDirectory())
            self._pools[ranks] = self._stack.enter_context(RankPool(ranks, Path(folder)))
        return self._pools[ranks].run(program, *arguments)


def cells_of(layout: Layout, pools: Pools) -> tuple[str, ...]:
    """Train a layout, and return the cells of its row."""
    if isinstance(layout, Unable):
        errors = pools.run(layout.ranks, layout.attempt)
        assert all(error.startswith(layout.error) for error in errors), errors
        untried = ["not run"] * (len(COLUMNS) - 3)
        return (layout.name, str(layout.ranks), f"not run: {layout.reason}", *untried)
    one = training.expected(layout)
    ranks = pools.run(layout.ranks, training.train, layout.name)
    norms = [_error(torch.tensor(rank["norms"]), torch.tensor(one.norms)) for rank in ranks]
    weights = [_largest_error(rank["weights"], one.weights) for rank in ranks]
    averages = [_largest_error(rank["averages"], one.averages) for rank in ranks]
    assert {name for rank in ranks for name in rank["weights"]} == one.weights.keys()
    bad = [step == training.BAD_STEP for step in range(training.NUM_STEPS)]
    return (
        layout.name,
        str(layout.ranks),
        _equal_or([*norms, *weights]),
        _local_norms(layout, pools),
        "all skip" if all(rank["skips"] == bad for rank in ranks) else "differs",
        _equal_or(averages),
        _checkpoint(layout, pools, one),
    )


def _local_norms(layout: Layout, pools: Pools) -> str:
    ranks = pools.run(layout.ranks, training.local_norms, layout.name)
    if all("refused" in rank for rank in ranks):
        return "refused"
    errors = [_error(rank["norms"], rank["expected"]) for rank in ranks]
    return _equal_or(errors, layout.local_norms)


def _checkpoint(layout: Layout, pools: Pools, one: training.Outcome) -> str:
    """Train on changing numbers of ranks, and compare the end with one process."""
    if not layout.resumes_on:
        return "same ranks"
    numbers = (layout.ranks, *layout.resumes_on)
    ends = [training.NUM_STEPS * (index + 1) // len(numbers) for index in range(len(numbers))]
    with tempfile.TemporaryDirectory() as top:
        saved, first, ranks = None, 0, []
        for number, end in zip(numbers, ends, strict=True):
            folder = f"{top}/step_{end}"
            ranks = pools.run(number, training.resume, layout.name, (first, end), saved, folder)
            saved, first = folder, end
    errors = [_largest_error(rank["weights"], one.weights) for rank in ranks]
    errors += [_largest_error(rank["averages"], one.averages) for rank in ranks]
    return _equal_or(errors, " → ".join(map(str, numbers)))


def _error(ours: Tensor, theirs: Tensor) -> float:
    """Return the largest difference, relative to the largest magnitude."""
    if ours.shape != theirs.shape:
        return float("inf")
    return ((ours - theirs).abs().max() / theirs.abs().max()).item()


def _largest_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Return the error of all tensors together: a bias that began at 0 has only rounded digits."""
    together = [torch.cat([of[name].flatten() for name in ours]) for of in (ours, theirs)]
    return _error(*together)


def _equal_or(errors: Sequence[float], text: str = "equal") -> str:
    # Not `max`, which may drop a nan.
    if all(error <= _TOLERANCE for error in errors):
        return text
    return f"differs by {max(errors):.0e}"


def read_cells(page: str) -> list[tuple[str, ...]]:
    """Return the rows of the table in a page."""
    _, _, rest = page.partition(_BEGIN)
    lines = rest.partition(_END)[0].strip().splitlines()[2:]
    return [tuple(cell.strip() for cell in line.strip("|").split("|")) for line in lines]


def with_table(page: str, rows: Iterable[Sequence[str]]) -> str:
    """Return a page with other rows in its table."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    table = "".join(f"| {' | '.join(cells)} |\n" for cells in lines)
    return f"{before}{_BEGIN}\n{table}\n{_END}{after}"
