"""Importing a callback that mfwrap does not have raises an error that says what to use instead."""

import pkgutil
import re

import pytest

from mfwrap import callbacks
from mfwrap.names import training
from mfwrap.names.texts import Without

ABSENT = {
    name: text for name, text in training.ROWS["callbacks"].items() if not isinstance(text, Without)
}


@pytest.mark.parametrize("name", ABSENT)
def test_an_import_says_what_to_write(name):
    """An import and an attribute lookup raise an error with the same advice."""
    with pytest.raises(ImportError, match=f"^mfwrap.callbacks has no `{name}`; write ") as raised:
        exec(f"from mfwrap.callbacks import {name}", {})  # noqa: S102  (the test's own text)
    assert ABSENT[name] in str(raised.value)
    with pytest.raises(AttributeError, match=re.escape(ABSENT[name])):
        getattr(callbacks, name)


def test_any_other_name_is_an_ordinary_error():
    """A misspelled name raises an ordinary ImportError."""
    with pytest.raises(ImportError, match="cannot import name 'SumaryCollector'"):
        exec("from mfwrap.callbacks import SumaryCollector", {})  # noqa: S102  (the test's own text)
    assert not hasattr(callbacks, "SumaryCollector")


@pytest.mark.parametrize("sentence", ABSENT.values(), ids=ABSENT)
def test_what_to_write_exists(sentence):
    """Every class and module that the advice names exists."""
    for path in re.findall(r"`((?:mfwrap|transformers)(?:\.\w+)+)", sentence):
        assert pkgutil.resolve_name(path) is not None
