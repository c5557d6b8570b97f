"""Curves are reduced without losing extremes, gaps or overflows."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.records.run_record import Curve, read_run
from mfwrap.report.curves import binned, means, overflow_steps, smoothed, thinned
from support.run_folders import write_run, write_trainer_run

VALUES = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400)


@given(values=VALUES, limit=st.integers(4, 60), bad=st.sets(st.integers(0, 399), max_size=3))
def test_thinned_curves_keep_their_extremes(values, limit, bad):
    """Thinning keeps the first, last, highest and lowest points, and a gap, and moves no point."""
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
    num_gaps = sum(not math.isfinite(value) for value in few.values)
    assert min(num_bad, 1) <= num_gaps <= num_bad
    assert len(kept) <= limit + 2 + num_gaps


def test_short_curves_are_not_thinned():
    """A curve with few points is returned unchanged."""
    curve = Curve([1, 2, 3], [1.0, math.nan, 2.0])

    assert thinned(curve) is curve


@given(slope=st.floats(-5, 5), length=st.integers(1, 300))
def test_smoothing_leaves_a_straight_line(slope, length):
    """Smoothing does not change a straight line, not even at its ends."""
    values = [slope * i for i in range(length)]

    assert smoothed(Curve(list(range(length)), values)).values == pytest.approx(values, abs=1e-6)


def test_smoothing_averages_finite_values():
    """Smoothing takes the mean of the nearby finite values; if there are none, the gap stays."""
    values = list(np.random.default_rng(0).normal(size=400))
    values[100] = math.inf
    expected = [
        np.mean([v for v in values[i - near : i + near + 1] if math.isfinite(v)])
        for i in range(400)
        for near in [min(6, i, 399 - i)]
    ]

    assert smoothed(Curve(list(range(400)), values)).values == pytest.approx(expected)
    assert math.isnan(smoothed(Curve([1], [math.nan])).values[0])


def test_smoothing_after_a_huge_loss():
    """A loss of 1e30 changes only the means whose window holds it."""
    values = [1.0] * 100 + [1e30] + [1.0] * 100

    smooth = smoothed(Curve(list(range(201)), values)).values
    assert smooth[:97] == [1.0] * 97
    assert smooth[-97:] == [1.0] * 97


@given(values=VALUES, limit=st.integers(1, 60))
def test_means_of_stretches(values, limit):
    """Each stretch has its mean, at a step within it."""
    found = means(Curve(list(range(len(values))), values), limit)

    width = math.ceil(len(values) / limit)
    parts = [values[start : start + width] for start in range(0, len(values), width)]
    assert found.values == pytest.approx([np.mean(part) for part in parts], abs=1e-6)
    assert [step // width for step in found.steps] == list(range(len(parts)))


def test_means_leave_non_finite_values_out():
    """A stretch without a finite value has no mean."""
    curve = Curve([1, 2, 3, 4], [math.nan, 2.0, math.inf, math.nan])

    assert means(curve, 2) == Curve([2], [2.0])


@given(
    norms=st.lists(st.floats(0, 1e6) | st.just(math.nan), min_size=1, max_size=2000),
    first=st.integers(0, 5),
)
def test_columns_have_the_largest_norm(norms, first):
    """Each of at most 800 columns shows the largest norm in it, NaN if one is not finite."""
    curve = Curve(list(range(first, first + len(norms))), norms)

    starts, (row,) = binned({"a": curve})

    assert len(starts) == len(row) <= 800
    assert starts[0] == first
    for start, end, norm in zip(starts, [*starts[1:], first + len(norms)], row, strict=True):
        within = norms[start - first : end - first]
        if all(map(math.isfinite, within)):
            assert norm == max(within)
        else:
            assert math.isnan(norm)


def test_groups_with_different_steps():
    """If a group has no norm in a column, its cell is empty."""
    groups = {"a": Curve([1, 2], [1.0, 2.0]), "b": Curve([2, 4], [3.0, 5.0])}

    assert binned(groups) == ([1, 2, 4], [[1.0, 2.0, None], [None, 3.0, 5.0]])


def test_overflows(tmp_path):
    """Overflows come from each step's flag, or from the count in a Trainer's log."""
    assert overflow_steps(read_run(write_run(tmp_path / "cell"))) == [20]
    assert overflow_steps(read_run(write_trainer_run(tmp_path / "trainer"))) == [4, 8]
