"""Lines, markers and menus of plotly figures are drawn as expected."""

import math

import plotly.graph_objects as go

from mfwrap.records.run_record import Curve
from mfwrap.report.curves import COLORS
from mfwrap.report.drawing import add_menu, color_of, line


def test_a_line_has_gaps():
    """Non-finite values are gaps, and a curve of one point is a marker."""
    several = line(Curve([1, 2, 3], [1.0, math.nan, 2.0]), "loss", COLORS[1])

    assert several.y == (1.0, None, 2.0)
    assert several.mode == "lines"
    assert several.line.color == COLORS[1]
    assert line(Curve([1], [1.0]), "loss", COLORS[0]).mode == "markers"


def test_more_runs_than_colors():
    """If there are more runs than colors, the colors repeat."""
    assert [color_of(number) for number in range(len(COLORS) + 1)] == [*COLORS, COLORS[0]]


def test_a_menu_chooses_traces():
    """Each entry of a menu shows its traces; a single entry gets no menu."""
    figure = go.Figure()
    add_menu(figure, {"a": [True]})
    assert not figure.layout.updatemenus

    add_menu(figure, {"a": [True, False, True], "b": [False, True, False]})

    (menu,) = figure.layout.updatemenus
    assert [button.label for button in menu.buttons] == ["a", "b"]
    assert [button.args[0]["visible"] for button in menu.buttons] == [
        [True, False, True],
        [False, True, False],
    ]
