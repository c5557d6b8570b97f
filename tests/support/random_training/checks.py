"""Compare the updates of a random training with those of the reference."""

import math
from collections.abc import Mapping, Sequence
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

__all__ = ["Observed", "assert_as_expected", "average_of", "observed", "scale_of"]


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


def assert_as_expected(
    case: Case, expected: Sequence["Expected"], actual: Sequence[Observed], rank: int = 0
) -> None:
    """Fail unless every update did what the contract says.

    Decisions, loss scales, rates and counters must be equal, and everything else close: in float32,
    a training of 7 updates is within 1e-4 of float64. With bfloat16 weights, each update rounds a
    weight by up to 2**-9 relative, and all gradients contain errors of that size.

    A skipped update must leave weights and averages bitwise as they were.
    """
    relative, absolute = (0.3, 0.15) if case.is_rounded else (1e-3, 1e-4)
    assert len(actual) == len(expected)
    for number, (update, told) in enumerate(zip(actual, expected, strict=True)):
        assert (update.overflow, update.skipped) == (told.overflow, told.skipped), number
        assert update.loss_scale == told.loss_scale, number
        assert update.rates == [torch.tensor(rate).item() for rate in told.rates], number
        assert update.counts == [
            told.applied_updates,
            told.skipped_updates,
            told.consecutive_skips,
        ], number
        near = {"rel_tol": relative, "abs_tol": absolute}
        assert _are_near(update.loss, told.losses[rank], **near), (number, update.loss, told.losses)
        assert (update.global_norm is None) == (case.max_norm is None), number
        if update.global_norm is not None:
            assert _are_near(update.global_norm, told.global_norm, **near), number
        expected_norms = told.local_norms[rank]
        for group, norm in update.local_norms.items():
            assert _are_near(norm, expected_norms.get(group, 0.0), **near), (number, group)
        assert expected_norms.keys() <= update.local_norms.keys()
        _assert_near(update.weights, told.weights, absolute, number)
        _assert_near(update.averages, told.averages, absolute, number)
        if update.skipped and number:
            before = actual[number - 1]
            for kind in ("weights", "averages"):
                for name, value in getattr(update, kind).items():
                    assert torch.equal(value, getattr(before, kind)[name]), (number, name)


def _are_near(actual: float, expected: float, *, rel_tol: float, abs_tol: float) -> bool:
    """Return whether two numbers are close, or both are non-finite."""
    if not math.isfinite(expected):
        return not math.isfinite(actual)
    return math.isclose(actual, expected, rel_tol=rel_tol, abs_tol=abs_tol)


def _assert_near(
    actual: Mapping[str, Tensor], expected: Mapping[str, Tensor], absolute: float, number: int
) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        difference = (tensor.double() - expected[name]).abs().max()
        largest = absolute * max(1.0, expected[name].abs().max().item())
        assert difference <= largest, f"update {number}: {name} differs by {difference}"
