"""Checks of arguments return the value, or raise an error with name, requirement and value."""

import math
import re
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mfwrap.arguments import (
    check_bool,
    check_callable,
    check_choice,
    check_int,
    check_number,
    check_positive_number,
    check_real,
    described,
)


def test_described_gives_value_and_type():
    """The type distinguishes a string from a number that looks the same."""
    assert described("3") == "'3' of type str"
    assert described(3) == "3 of type int"


@pytest.mark.parametrize("value", [True, False])
def test_check_bool_returns_a_bool(value):
    """A bool is returned unchanged."""
    assert check_bool("flag", value) is value


@pytest.mark.parametrize("value", [0, 1, "True", None, 1.0])
def test_check_bool_refuses_anything_else(value):
    """Other truthy or falsy values are a TypeError."""
    with pytest.raises(TypeError, match="`flag` must be a bool, got"):
        check_bool("flag", value)


@given(st.integers(min_value=1))
def test_check_int_returns_an_int(value):
    """An int >= 1 is returned unchanged."""
    assert check_int("count", value) == value


@given(st.integers(max_value=0))
def test_check_int_refuses_ints_below_1(value):
    """Zero and negative ints are a ValueError."""
    with pytest.raises(ValueError, match=f"`count` must be >= 1, got {value}$"):
        check_int("count", value)


@pytest.mark.parametrize("value", [2.0, True, "2", None])
def test_check_int_refuses_other_types(value):
    """A whole float, a bool and a string are a TypeError."""
    with pytest.raises(TypeError, match=r"`count` must be an int, got .* of type"):
        check_int("count", value)


@given(st.integers(1, 10**300) | st.floats(min_value=0, exclude_min=True, allow_infinity=False))
def test_check_positive_number_returns_a_float(value):
    """An int or float > 0 is returned as a float of the same value."""
    for finite in (False, True):
        number = check_positive_number("norm", value, finite=finite)

        assert isinstance(number, float)
        assert number == float(value)


@given(st.integers(max_value=0) | st.floats(max_value=0) | st.just(math.nan))
def test_check_positive_number_refuses_numbers_not_above_0(value):
    """Zero, negative numbers and nan are a ValueError."""
    with pytest.raises(ValueError, match=f"`norm` must be > 0, got {re.escape(str(value))}$"):
        check_positive_number("norm", value)


def test_check_positive_number_takes_infinity_unless_it_must_be_finite():
    """Infinity is accepted by default, but raises a ValueError with ``finite=True``."""
    assert check_positive_number("norm", math.inf) == math.inf
    with pytest.raises(ValueError, match="`scale` must be > 0 and finite, got inf"):
        check_positive_number("scale", math.inf, finite=True)


@pytest.mark.parametrize("value", [10**400, -(10**400)], ids=["positive", "negative"])
def test_check_positive_number_refuses_an_int_that_no_float_holds(value):
    """An int beyond the largest float is a ValueError, not an OverflowError."""
    with pytest.raises(ValueError, match="`scale` must be"):
        check_positive_number("scale", value, finite=True)


@pytest.mark.parametrize("value", ["1.0", None, True, 1j, [1.0]])
def test_check_positive_number_refuses_other_types(value):
    """A bool, a string and a complex number are a TypeError."""
    with pytest.raises(TypeError, match=r"`norm` must be a number, got .* of type"):
        check_positive_number("norm", value)


@given(st.integers(2, 10**300) | st.floats(min_value=2, allow_infinity=False))
def test_check_number_returns_a_float(value):
    """A finite number >= the minimum is returned as a float of the same value."""
    number = check_number("rate", value, minimum=2)

    assert isinstance(number, float)
    assert number == float(value)


@pytest.mark.parametrize("value", [-0.1, math.inf, math.nan, 10**400])
def test_check_number_refuses_numbers_out_of_range(value):
    """A number that is negative, non-finite or too large for a float is a ValueError."""
    with pytest.raises(ValueError, match="`rate` must be >= 0 and finite, got"):
        check_number("rate", value)


@pytest.mark.parametrize("value", ["1", None, True])
def test_check_real_refuses_other_types(value):
    """A string, ``None`` and a bool are a TypeError."""
    with pytest.raises(TypeError, match="`rate` must be a number, got"):
        check_real("rate", value)


def test_check_real_accepts_every_real_number():
    """NumPy's scalars and fractions are real numbers, too."""
    for value in (1, 0.5, np.float32(0.5), Fraction(1, 3)):
        assert check_real("rate", value) is value


def test_check_callable_refuses_what_cannot_be_called():
    """A function and a class pass; any other value is a TypeError."""
    check_callable("hook", print)
    check_callable("hook", dict)
    with pytest.raises(TypeError, match=r"^`hook` must be callable, got 3 of type int$"):
        check_callable("hook", 3)


def test_check_choice_refuses_other_values():
    """Any other value is a ValueError that lists the choices."""
    check_choice("mode", "min", ("min", "max"))
    with pytest.raises(ValueError, match=r"^`mode` must be one of \['min', 'max'\], got 'mean'$"):
        check_choice("mode", "mean", ("min", "max"))
