"""Curves are described with gaps, marks of non-finite steps, and short numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.records.run_record import Curve
from mfwrap.report.curves import COLORS
from mfwrap.report.drawing import Panel, color_of, line, points, rounded


def test_a_line_has_gaps():
    """Non-finite values are gaps, and their steps are listed."""
    drawn = line(1, "loss", Curve([1, 2, 3, 4], [1.0, math.nan, 2.0, math.inf]), smooth=True)

    assert drawn["y"] == [1, None, 2, None]
    assert drawn["bad"] == [2, 4]
    assert (drawn["run"], drawn["name"], drawn["x"]) == (1, "loss", [1, 2, 3, 4])
    assert "means" not in drawn
    assert "bad" not in line(0, "loss", Curve([1], [1.0]))


def test_a_long_line_has_means():
    """A long line that may be smoothed has means over its stretches, not over its extremes."""
    steps = list(range(1, 10_001))
    values = [100.0 if step % 50 == 0 else 1.0 for step in steps]
    drawn = line(0, "loss", Curve(steps, values), smooth=True)

    assert len(drawn["x"]) <= 2002
    assert max(drawn["y"]) == 100
    mean = drawn["means"]
    assert sum(mean["y"]) / len(mean["y"]) == pytest.approx(sum(values) / len(values), rel=1e-4)
    assert "means" not in line(0, "rate", Curve(steps, values))


def test_points_have_a_symbol():
    """Markers are at the given steps; a value that is not finite has none."""
    drawn = points(0, "evaluation", {10: 2.5, 20: math.nan}, "circle", weights="raw")

    assert (drawn["x"], drawn["y"], drawn["symbol"]) == ([10, 20], [2.5, None], "circle")
    assert drawn["weights"] == "raw"


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_numbers_are_short(value):
    """A number has five significant digits, and is as near as five digits allow."""
    assert rounded(value) == float(f"{value:.5g}")


def test_more_runs_than_colors():
    """If there are more runs than colors, the colors repeat."""
    assert [color_of(number) for number in range(len(COLORS) + 1)] == [*COLORS, COLORS[0]]


def test_empty_panels():
    """A panel without curves and maps is empty."""
    assert Panel("loss", "Loss", "", {"kind": "curves", "traces": []}).is_empty
    assert Panel("norms", "Norms", "", {"kind": "map", "maps": []}).is_empty
    assert not Panel("norms", "Norms", "", {"kind": "map", "maps": [{}]}).is_empty
