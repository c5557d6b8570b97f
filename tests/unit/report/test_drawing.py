"""Curves are described with gaps, marks of non-finite steps, and short numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.records.run_record import Curve, RunRecord
from mfwrap.report.curves import COLORS
from mfwrap.report.drawing import Panel, color_of, line, lines, rounded


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
    """Markers are at all steps; one that is not finite is listed, as in a line."""
    drawn = line(0, "evaluation", Curve([10, 20], [2.5, math.nan]), symbol="circle", weights="raw")

    assert (drawn["x"], drawn["y"], drawn["symbol"]) == ([10, 20], [2.5, None], "circle")
    assert (drawn["weights"], drawn["bad"]) == ("raw", [20])
    steps = list(range(10_000))
    assert line(0, "overflow", Curve(steps, [1.0] * 10_000), symbol="x-thin")["x"] == steps


def test_each_run_that_has_a_curve():
    """A line has the number of its run, and its name if there are several runs."""
    curve = Curve([1], [2.0])
    runs = [RunRecord(name, {key: curve}, {}, []) for name, key in (("a", "x"), ("b", "loss"))]

    assert lines(runs, "loss", "training") == [line(1, "b: training", curve)]
    assert lines(runs[1:], "loss", "training", smooth=True)[0]["name"] == "training"


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
