"""Curves are thinned and smoothed without hiding what matters."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.records.run_record import Curve
from mfwrap.report.drawing import smoothed, thinned

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400)


@given(values=VALUES, limit=st.integers(4, 60), bad=st.sets(st.integers(0, 399), max_size=3))
def test_thinned_curves_keep_their_extremes(values, limit, bad):
    """First, last, highest, lowest and whatever is not finite stay; no point is moved."""
    values = [math.nan if i in bad else value for i, value in enumerate(values)]
    curve = Curve(list(range(1, len(values) + 1)), values)

    few = thinned(curve, limit)

    points = dict(zip(curve.steps, curve.values, strict=True))
    kept = dict(zip(few.steps, few.values, strict=True))
    assert all(repr(points[step]) == repr(value) for step, value in kept.items())
    assert few.steps == sorted(kept)
    assert {1, len(values)} <= kept.keys()
    finite = [value for value in values if math.isfinite(value)]
    if finite:
        assert {max(finite), min(finite)} <= set(few.values)
    num_bad = sum(not math.isfinite(value) for value in values)
    assert sum(not math.isfinite(value) for value in few.values) == num_bad
    assert len(kept) <= max(limit + 2 + num_bad, 0)


def test_short_curves_are_not_thinned():
    """They are what they were."""
    curve = Curve([1, 2, 3], [1.0, math.nan, 2.0])

    assert thinned(curve) is curve


@given(slope=st.floats(-5, 5), length=st.integers(1, 300))
def test_smoothing_leaves_a_straight_line(slope, length):
    """Also at its ends."""
    values = [slope * i for i in range(length)]

    assert smoothed(Curve(list(range(length)), values)).values == pytest.approx(values, abs=1e-6)


def test_smoothing_averages_what_is_finite():
    """Against a mean by NumPy; a gap stays one only if nothing is near."""
    values = list(np.random.default_rng(0).normal(size=400))
    values[100] = math.inf
    expected = [
        np.mean([v for v in values[i - near : i + near + 1] if math.isfinite(v)])
        for i in range(400)
        for near in [min(6, i, 399 - i)]
    ]

    assert smoothed(Curve(list(range(400)), values)).values == pytest.approx(expected)
    assert math.isnan(smoothed(Curve([1], [math.nan])).values[0])
