"""Compare a run with its twin, the same run without the fault."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

__all__ = ["DEVIATIONS", "Class", "Comparison", "compare"]

DEVIATIONS = 6.0
"""Half of the width of the twin's band, in robust deviations."""

_ROUNDING = 1e-5
"""Relative difference that rounding explains."""

_LEAST = 5e-3
"""Least deviation: of the loss, as a share of its level; of the logarithm of a norm, itself."""

_TINY = 1e-12
_USUAL = 5
"""Values whose median is what the next one is expected to be."""


class Class(StrEnum):
    """How much of a fault is in the numbers of its run."""

    NOT_FINITE = "not finite"
    VISIBLE = "visible"
    WEAK = "weak"
    WITHOUT_EFFECT = "without effect"


@dataclass(frozen=True, slots=True)
class Comparison:
    """What the numbers of a run say beside those of its twin."""

    class_: Class
    loss_score: float
    """Largest distance of the loss from the twin's, in deviations."""

    norm_score: float
    """The same of the norm of a layer's gradients."""

    has_diverged: bool
    """Whether the loss was above the twin's band in all of the last steps, or was not finite."""


def compare(
    run: Sequence[Mapping[str, np.ndarray]],
    twin: Sequence[Mapping[str, np.ndarray]],
    layers: Sequence[int],
    first: int,
    last: int,
) -> Comparison:
    """Compare the series of a run with those of its twin.

    Args:
        run: Series of each rank, see `support.faults.series.Series`.
        twin: Series of each rank of the twin.
        layers: For each group of gradients, the number of its layer.
        first: First step of the fault, counted from 1.
        last: Last step that is compared.
    """
    window = slice(first - 1, last)
    pairs = list(zip(run, twin, strict=True))
    names = ("loss", "local_norm", "weight_norm")
    with np.errstate(all="ignore"):
        loss = max(_loss_score(one["loss"], other["loss"], window) for one, other in pairs)
        norm = max(
            _norm_score(one["local_norm"], other["local_norm"], layers, window)
            for one, other in pairs
        )
        has_diverged = any(
            _has_diverged(one["loss"], other["loss"], window) for one, other in pairs
        )
        is_same = all(
            _is_same(one[name][window], other[name][window])
            for one, other in pairs
            for name in names
        )
    is_finite = all(np.isfinite(one[name][window]).all() for one in run for name in names)
    if not is_finite:
        class_ = Class.NOT_FINITE
    elif max(loss, norm) > DEVIATIONS:
        class_ = Class.VISIBLE
    else:
        class_ = Class.WITHOUT_EFFECT if is_same else Class.WEAK
    return Comparison(class_, loss, norm, has_diverged)


def _is_same(run: np.ndarray, twin: np.ndarray) -> bool:
    return bool(np.allclose(run, twin, rtol=_ROUNDING, atol=_TINY, equal_nan=True))


def _deviation(series: np.ndarray) -> float:
    """Return the robust deviation of a series from the median of the values before."""
    expected = np.array(
        [np.median(series[max(0, place - _USUAL) : place]) for place in range(1, len(series))]
    )
    residuals = series[1:] - expected
    return float(1.4826 * np.median(np.abs(residuals - np.median(residuals))))


def _loss_score(run: np.ndarray, twin: np.ndarray, window: slice) -> float:
    level = _LEAST * float(np.median(np.abs(twin)))
    return _score(run, twin, window, max(_deviation(twin), level))


def _score(run: np.ndarray, twin: np.ndarray, window: slice, deviation: float) -> float:
    distances = np.abs(run[window] - twin[window])
    finite = distances[np.isfinite(distances)]
    return float(finite.max() / max(deviation, _TINY)) if len(finite) else 0.0


def _norm_score(run: np.ndarray, twin: np.ndarray, layers: Sequence[int], window: slice) -> float:
    scores = []
    for layer in set(layers):
        groups = [number for number, each in enumerate(layers) if each == layer]
        ours, its = (
            np.log(np.sqrt((norms[:, groups].astype(float) ** 2).sum(1)) + _TINY)
            for norms in (run, twin)
        )
        scores.append(_score(ours, its, window, max(_deviation(its), _LEAST)))
    return max(scores)


def _has_diverged(run: np.ndarray, twin: np.ndarray, window: slice) -> bool:
    """Return whether all of the last losses are above the twin's band."""
    deviation = max(_deviation(twin), _LEAST * float(np.median(np.abs(twin))))
    above = run[window] - twin[window] > DEVIATIONS * deviation
    ends = (above | ~np.isfinite(run[window]))[-_USUAL:]
    return bool(ends.all()) and len(ends) == _USUAL
