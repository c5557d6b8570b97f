"""Compare the updates of a random training with those of the reference."""

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from mfwrap import (
    DynamicLossScaleUpdateCell,
    ExponentialMovingAverage,
    FixedLossScaleUpdateCell,
    StepReport,
)
from support.random_training.cases import Case

if TYPE_CHECKING:
    # Ranks import this module, and need not import hypothesis.
    from support.random_training.reference import Expected

__all__ = ["Observed", "average_of", "differences", "observed", "scale_of"]


class Observed(NamedTuple):
    """What one update reports, and the state after it; plain values and tensors."""

    loss: float
    overflow: bool
    skipped: bool
    loss_scale: float
    rates: list[float]
    global_norm: float | None
    local_norms: dict[str, float]
    counts: list[int]
    weights: dict[str, Tensor]
    averages: dict[str, Tensor]


def scale_of(case: Case) -> Any:
    """Return a case's loss scale as the cell takes it."""
    kind, value, *settings = case.scale
    if kind == "dynamic":
        factor, window, hysteresis = settings
        return DynamicLossScaleUpdateCell(value, factor, window, hysteresis=hysteresis)
    return FixedLossScaleUpdateCell(value) if kind == "fixed" else value


def average_of(case: Case, network: nn.Module) -> ExponentialMovingAverage | None:
    """Return a new average of a network, with a case's settings."""
    if case.average is None:
        return None
    decay, warmup, update_every = case.average
    return ExponentialMovingAverage(network, decay, warmup=warmup, update_every=update_every)


def observed(
    report: StepReport, network: nn.Module, average: ExponentialMovingAverage | None
) -> Observed:
    """Return what an update has reported and done."""
    output = report.output
    return Observed(
        output.loss.item(),
        output.overflow.item(),
        report.skipped.item(),
        output.loss_scale.item(),
        report.learning_rates.tolist(),
        None if output.global_norm is None else output.global_norm.item(),
        dict(zip(report.local_norm_names, output.local_norm.tolist(), strict=True)),
        [
            counter.item()
            for counter in (
                report.applied_updates,
                report.skipped_updates,
                report.consecutive_skips,
            )
        ],
        {name: p.detach().clone() for name, p in network.named_parameters()},
        {} if average is None else {n: each.clone() for n, each in average.named_averages()},
    )


def differences(
    case: Case, expected: Sequence["Expected"], actual: Sequence[Observed], rank: int = 0
) -> list[str]:
    """Return a sentence for each value in which an update differs from the contract.

    Decisions, loss scales, rates and counters must be equal, and everything else close: in float32,
    a training of 7 updates is within 1e-4 of float64. With bfloat16 weights, each update rounds a
    weight by up to 2**-9 relative, and all gradients contain errors of that size.

    A skipped update must leave weights and averages bitwise as they were.
    """
    if len(actual) != len(expected):
        return [f"{len(actual)} updates, expected {len(expected)}"]
    before = (None, *actual)
    return [
        f"update {number}: {line}"
        for number, update in enumerate(actual)
        for line in (
            *_unequal(update, expected[number]),
            *_far(case, update, expected[number], rank),
            *_changed_by_skip(update, before[number]),
        )
    ]


def _unequal(update: Observed, expected: "Expected") -> Iterator[str]:
    rates = [torch.tensor(rate).item() for rate in expected.rates]
    counts = [expected.applied_updates, expected.skipped_updates, expected.consecutive_skips]
    pairs = {
        "overflow": (update.overflow, expected.overflow),
        "skipped": (update.skipped, expected.skipped),
        "loss scale": (update.loss_scale, expected.loss_scale),
        "learning rates": (update.rates, rates),
        "counts": (update.counts, counts),
    }
    for name, (value, wanted) in pairs.items():
        if value != wanted:
            yield f"{name}: {value}, expected {wanted}"


def _far(case: Case, update: Observed, expected: "Expected", rank: int) -> Iterator[str]:
    relative, absolute = (0.3, 0.15) if case.is_rounded else (1e-3, 1e-4)
    numbers = {"loss": (update.loss, expected.losses[rank])}
    norms = expected.local_norms[rank]
    for group in norms.keys() | update.local_norms.keys():
        numbers[f"local norm of {group}"] = (update.local_norms.get(group), norms.get(group, 0.0))
    wants_norm = case.max_norm is not None
    numbers["global norm"] = (update.global_norm, expected.global_norm if wants_norm else None)
    for name, (value, wanted) in numbers.items():
        if not _are_near(value, wanted, rel_tol=relative, abs_tol=absolute):
            yield f"{name}: {value}, expected {wanted}"
    for kind in ("weights", "averages"):
        tensors, wanted_tensors = getattr(update, kind), getattr(expected, kind)
        if tensors.keys() != wanted_tensors.keys():
            yield f"{kind}: {sorted(tensors)}, expected {sorted(wanted_tensors)}"
            continue
        for name, tensor in tensors.items():
            distance = (tensor.double() - wanted_tensors[name]).abs().max().item()
            # A NaN is not within the limit.
            if not distance <= absolute * max(1.0, wanted_tensors[name].abs().max().item()):
                yield f"{name} of the {kind} differs by {distance}"


def _changed_by_skip(update: Observed, before: Observed | None) -> Iterator[str]:
    if before is None or not update.skipped:
        return
    for kind in ("weights", "averages"):
        for name, tensor in getattr(update, kind).items():
            if not torch.equal(tensor, getattr(before, kind)[name]):
                yield f"{name} of the {kind} was changed by a skipped update"


def _are_near(
    actual: float | None, expected: float | None, *, rel_tol: float, abs_tol: float
) -> bool:
    """Return whether two numbers are close, both are non-finite, or both are missing."""
    if actual is None or expected is None:
        return actual is expected
    if not math.isfinite(expected):
        return not math.isfinite(actual)
    return math.isclose(actual, expected, rel_tol=rel_tol, abs_tol=abs_tol)
