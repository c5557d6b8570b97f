"""Compare what a script has done with and without mfwrap."""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from support.scripts_table.launch import FACTS, OUTPUT, WEIGHTS

__all__ = ["Difference", "Outcome", "difference", "outcome"]

_TIMES = re.compile(r"runtime|per_second|time|memory|flos|profiling")
"""Numbers of a log that depend on the clock."""


@dataclass(frozen=True)
class Outcome:
    """What a run of a script has left."""

    error: str
    """Last line of its traceback; "" if it ended without an error."""

    digests: Sequence[str] = ()
    """Digest of the weights after each update."""

    losses: Sequence[float] = ()
    """Loss of each backward pass."""

    log: Sequence[Mapping[str, float]] = ()
    """Numbers of each log of a Trainer."""

    weights: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """Final weights."""

    bfloat16: bool = False
    """Whether a Trainer trains in bfloat16."""

    noise: Sequence[str] = ()
    """Names of weights whose gradients were nothing but rounding in each update."""

    by_mfwrap: int = 0
    """Number of updates that mfwrap's step has done."""


def outcome(folder: Path) -> Outcome:
    """Return what a run has left in its folder."""
    if not (folder / FACTS).exists():
        lines = (folder / OUTPUT).read_text(encoding="utf-8", errors="replace").splitlines()
        errors = [line for line in lines if re.match(r"\w[\w.]*(Error|Exception|Exit)\b", line)]
        # Without the folder of a module.
        return Outcome(re.sub(r" \(/.*\)$", "", (errors or lines or ["no output"])[-1]))
    facts = json.loads((folder / FACTS).read_text(encoding="utf-8"))
    weights = load_file(folder / WEIGHTS)
    return Outcome("", weights=weights, **facts)


@dataclass(frozen=True)
class Difference:
    """How far two runs of a script are apart."""

    updates: int
    """Number of updates of the first run."""

    losses: float
    """Largest difference of a loss, relative to the larger of its magnitude and 1; 0.0 if all are
    equal bit for bit."""

    weights: float
    """Largest difference of a final weight, relative to the largest magnitude of all weights; 0.0
    if all are equal bit for bit. Without weights whose gradients were nothing but rounding: Adam
    moves them by the learning rate, in a direction that rounding decides."""

    equal_updates: int
    """Number of updates from the beginning after which all weights are equal bit for bit."""

    numbers: float
    """Largest difference of any other number in the log, like `losses`."""

    bfloat16: bool
    """Whether a Trainer trained in bfloat16."""

    faults: Sequence[str]
    """What cannot be compared, such as numbers of updates that differ."""

    @property
    def is_none(self) -> bool:
        """Whether all losses and all weights after each update are equal bit for bit."""
        return not (self.faults or self.losses or self.weights) and (
            self.equal_updates == self.updates
        )


def difference(stock: Outcome, ours: Outcome, intended: Iterable[str] = ()) -> Difference:
    """Compare two runs that ended without an error.

    Args:
        stock: Run without mfwrap.
        ours: Run with mfwrap.
        intended: Names of numbers in the log that are not compared.
    """
    faults = []
    if len(set(stock.digests)) < 2:
        faults.append("the weights do not change")
    if stock.by_mfwrap or ours.by_mfwrap != len(ours.digests):
        faults.append(f"mfwrap did {stock.by_mfwrap} and {ours.by_mfwrap} updates")
    if len(stock.digests) != len(ours.digests):
        faults.append(f"{len(stock.digests)} and {len(ours.digests)} updates")
    if {n: w.shape for n, w in stock.weights.items()} != {
        n: w.shape for n, w in ours.weights.items()
    }:
        faults.append("other weights")
        distance = math.inf
    else:
        compared = {name: w for name, w in stock.weights.items() if name not in stock.noise}
        distance = _distance(compared, ours.weights)
    losses, numbers = _logged(stock, ours, set(intended), faults)
    pairs = zip(stock.digests, ours.digests, strict=False)
    equal = next(
        (count for count, (one, other) in enumerate(pairs) if one != other),
        min(len(stock.digests), len(ours.digests)),
    )
    updates = len(stock.digests)
    return Difference(updates, losses, distance, equal, numbers, stock.bfloat16, faults)


def _distance(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> float:
    if all(torch.equal(weight, other[name]) for name, weight in one.items()):
        return 0.0
    largest = max(weight.double().abs().max().item() for weight in one.values())
    apart = max(
        (weight.double() - other[name].double()).abs().max().item() for name, weight in one.items()
    )
    return apart / largest


def _logged(
    stock: Outcome, ours: Outcome, intended: set[str], faults: list[str]
) -> tuple[float, float]:
    """Return the largest differences of a loss and of any other number."""
    if not stock.log:
        pairs = [("loss", pair) for pair in _paired(stock.losses, ours.losses, "losses", faults)]
    else:
        pairs = []
        for one, other in _paired(stock.log, ours.log, "logs", faults):
            missing = sorted(set(one) - set(other))
            if missing:
                faults.append(f"no {', '.join(missing)} in a log")
            common = (one.keys() & other.keys()) - intended
            compared = [name for name in common if not _TIMES.search(name)]
            pairs += [(name, (one[name], other[name])) for name in compared]
    largest = {True: 0.0, False: 0.0}
    for name, (one, other) in pairs:
        is_loss = "loss" in name
        largest[is_loss] = max(largest[is_loss], _apart(one, other))
    return largest[True], largest[False]


def _paired(
    one: Sequence[Any], other: Sequence[Any], what: str, faults: list[str]
) -> Iterator[tuple[Any, Any]]:
    if len(one) != len(other):
        faults.append(f"{len(one)} and {len(other)} {what}")
    return zip(one, other, strict=False)


def _apart(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    apart = abs(one - other) / max(abs(one), 1.0)
    return math.inf if math.isnan(apart) else apart
