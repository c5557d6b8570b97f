"""Keys of a MindFormers file are taken once, and a key that nobody takes is an error."""

import pytest

from mfwrap.runner import RecipeError
from mfwrap.runner.document import RecipeDocument
from mfwrap.runner.mindformers.source import SourceFile

TEXT = """
shared: &shared {batch_size: 4, shuffle: False}
task: {config: *shared}
empty: ''
none: None
number: 1.e-5
section: {known: 1, unknown: 2}
"""


@pytest.fixture
def source():
    """Return a file."""
    return SourceFile(RecipeDocument.parse(TEXT, "m.yaml"))


def test_a_value_is_taken_once(source):
    """An alias is taken in the place where it is named, and stays in the other."""
    assert source.integer("shared", "batch_size", default=1) == 4
    assert source.integer("shared", "batch_size", default=1) == 1
    assert source.take("task", "config", "batch_size") == 4
    assert source.left(("shared",)) == ["shuffle"]


def test_empty_values_are_missing(source):
    """An empty string, and MindFormers' ``None`` without quotes, count as missing."""
    assert source.text("empty") is None
    assert source.integer("none", default=7) == 7
    assert ("empty",) not in source
    assert source.number("number", default=0) == 1e-5


def test_a_key_that_is_left_is_an_error(source):
    """The error names the line; keys without effect are remembered."""
    source.ignore_keys(("section",), {"known", "other"})

    assert source.without_effect == ["section.known"]
    with pytest.raises(RecipeError, match=r"m.yaml:7: section.unknown: unknown key"):
        source.refuse_left(("section",))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda source: source.integer("number", default=1), "number: expected an integer >= 1"),
        (lambda source: source.flag("number"), "number: expected true or false"),
        (lambda source: source.mapping("number"), "number: expected a mapping"),
        (lambda source: source.text("section"), "section: expected a string"),
        (lambda source: source.number("section", default=1), "section: expected a number"),
    ],
)
def test_a_value_of_a_wrong_type(source, call, says):
    """A value of a wrong type is an error that names key, expectation and value."""
    with pytest.raises(RecipeError, match=says):
        call(source)
