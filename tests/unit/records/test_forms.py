"""Values of another form than expected are left out of records."""

import pytest

from mfwrap.records.forms import fits, fitting, to_number


@pytest.mark.parametrize(
    ("form", "right", "wrong"),
    [
        (int, [0, -1, 10**30], [True, 1.0, "1", None]),
        (float, [0, 1.5, True, "nan", "-inf"], ["1", None, [], {}]),
        (str, ["", "a"], [1, None, ["a"]]),
        ([int], [[], [1, 2]], [[1, "2"], {}, None, "12"]),
        ({"a": int}, [{"a": 1}, {"a": 1, "b": None}], [{}, {"a": "1"}, [], None]),
        ([{"a": int}], [[{"a": 1}]], [[{}], {"a": 1}]),
    ],
)
def test_forms(form, right, wrong):
    """A list needs the form for each item, a mapping has the values that are named."""
    assert [fits(value, form) for value in right] == [True] * len(right)
    assert [fits(value, form) for value in wrong] == [False] * len(wrong)


def test_what_fits_of_a_record():
    """A value without a form stays."""
    record = {"step": "1", "name": ["odd"], "ranks": [0]}

    assert fitting(record, {"step": int, "ranks": [int]}) == {"name": ["odd"], "ranks": [0]}


def test_numbers():
    """The strings of non-finite numbers are numbers."""
    assert to_number("inf") == float("inf")
    assert to_number("1.0") is None
