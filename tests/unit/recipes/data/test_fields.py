"""The types of a table's columns follow from all of its fields."""

import pandas as pd
import pytest

from mfwrap.recipes.data.fields import ColumnTypes, is_number


def types_of(*fields, texts=()):
    """Return the type of a column ``a`` with some fields."""
    types = ColumnTypes(texts)
    for field in fields:
        types.add(["a"], [field])
    return types.features(["a"])["a"].dtype


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (["1", "-2", "+3", "007"], "int64"),
        (["1", "2.5"], "float64"),
        (["1e3", " .5", "1."], "float64"),
        (["9" * 30], "float64"),
        (["True", "false"], "bool"),
        (["1", ""], "float64"),
        (["True", ""], "string"),
        (["", ""], "float64"),
        (["1", "x"], "string"),
        (["1", "True"], "string"),
        (["nan"], "string"),
        (["1_000"], "string"),
        (["\u0661"], "string"),
    ],
)
def test_the_type_of_a_column(fields, wanted):
    """A column has the narrowest type that has all of its fields, which pandas can read."""
    found = types_of(*fields)

    assert found == wanted
    read = pd.Series(fields).replace("", None)
    if wanted in {"int64", "float64"}:
        assert pd.to_numeric(read).notna().sum() == read.notna().sum()


def test_texts():
    """A column of texts is a string."""
    assert types_of("1", texts=["a"]) == "string"


def test_a_text_that_is_a_number():
    """Only a text can look like a number."""
    assert is_number("1978")
    assert not is_number("unknown")
    assert not is_number(1978)
